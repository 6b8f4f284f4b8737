// The live view: reads `/server_info` once a second while it is seen, and draws the last minutes.

import { request } from "./api.js";
import { Chart, plain, SPAN } from "./chart.js";
import { element, find } from "./dom.js";

const EVERY = 1000; // milliseconds
const RECENT = 60; // seconds that the hit rate is of

const CHARTS = [
  { title: "Requests", lines: [["running", (s) => s.running], ["waiting", (s) => s.waiting]] },
  { title: "Batch", lines: [["rows a step", (s) => s.rows]] },
  { title: "Output tokens", lines: [["per second", (s) => s.output]] },
  { title: "Prompt tokens", lines: [["computed/s", (s) => s.computed], ["cached/s", (s) => s.cached]] },
  { title: "Step time", unit: " ms", lines: [["mean", (s) => s.step]] },
  { title: "Token gaps", unit: " ms", lines: [["mean", (s) => s.gap], ["p99", (s) => s.gap99]] },
  { title: "Device", unit: " %", most: 100, lines: [["busy", (s) => s.busy]] },
  { title: "KV cache", unit: " %", most: 100, lines: [["in use", (s) => s.used], ["hit rate", (s) => s.hits]] },
];

const charts = CHARTS.map((each) => new Chart(each));
const samples = [];
let previous = null;
let timer = 0;
let polling = false;
let reconnect;

/** Draw the empty view. `connect` is called after a failure: it finds out what is wrong, and calls `watch`
 * when the server answers again. */
export function startEngine(connect) {
  reconnect = connect;
  find("charts").append(...charts.map((chart) => chart.node));
  document.addEventListener("visibilitychange", watch);
  window.addEventListener("hashchange", watch);
}

/** Read while the view is seen, and only then. */
export async function watch() {
  clearTimeout(timer);
  if (polling || find("engine").hidden || document.hidden) return;
  polling = true;
  try {
    show(await (await request("server_info")).json());
    find("engine-error").hidden = true;
    timer = setTimeout(watch, EVERY);
  } catch (error) {
    find("engine-error").textContent = error.message;
    find("engine-error").hidden = false;
    if (error.status !== 401) timer = setTimeout(reconnect, EVERY); // else until there is a key
  } finally {
    polling = false;
  }
}

function show(info) {
  const now = total(info.internal_states);
  const sample = sampled(now, previous);
  previous = now;
  samples.push(sample);
  while (samples[0].t < sample.t - SPAN) samples.shift();
  sample.hits = hitRate(sample);
  for (const chart of charts) chart.draw(samples);
  showPool(now.cache);
  showFacts(info, now);
}

/** The engines of all replicas as one: sums, the highest lag, the mean share of time in steps. */
function total(states) {
  const sum = (value) => states.reduce((all, each) => all + value(each), 0);
  const summed = (value) => {
    const all = {};
    for (const each of states) for (const [name, n] of Object.entries(value(each))) all[name] = (all[name] ?? 0) + n;
    return all;
  };
  const { inter_token: gaps } = states[0].histograms;
  const drafts = states.map((each) => each.drafts).filter(Boolean);
  return {
    t: performance.now() / 1000,
    ...summed(({ scheduler: { waiting, running, steps, prompt_tokens, cached_tokens, output_tokens, retractions } }) =>
      ({ waiting, running, steps, prompt_tokens, cached_tokens, output_tokens, retractions })),
    finished: summed((each) => each.finished),
    refused: summed((each) => each.scheduler.refused),
    cache: { ...summed((each) => each.scheduler.cache), page_size: states[0].scheduler.cache.page_size },
    device: sum((each) => each.device_seconds),
    busy: sum((each) => each.busy) / states.length,
    lag: Math.max(...states.map((each) => each.loop_lag)),
    gaps: {
      bounds: gaps.bounds,
      counts: gaps.counts.map((_, at) => sum((each) => each.histograms.inter_token.counts[at])),
      total: sum((each) => each.histograms.inter_token.total),
    },
    drafted: drafts.reduce((all, each) => all + each.drafted, 0),
    accepted: drafts.reduce((all, each) => all + each.accepted, 0),
    replicas: states.length,
  };
}

/** What happened between two readings. Means of nothing are null. */
function sampled(now, before) {
  const { cache } = now;
  const sample = {
    t: now.t, running: now.running, waiting: now.waiting, busy: 100 * now.busy,
    used: cache.total ? (100 * (cache.total - cache.free - cache.cached)) / cache.total : 0,
    queried: cache.queried_tokens, hit: cache.hit_tokens,
    output: null, computed: null, cached: null, rows: null, step: null, gap: null, gap99: null,
  };
  if (!before || now.steps < before.steps) return sample; // the first one, or the server is another
  const seconds = now.t - before.t;
  const steps = now.steps - before.steps;
  const counts = now.gaps.counts.map((count, at) => count - before.gaps.counts[at]);
  const tokens = counts.reduce((all, count) => all + count, 0);
  const cached = now.cached_tokens - before.cached_tokens;
  sample.output = (now.output_tokens - before.output_tokens) / seconds;
  sample.cached = cached / seconds;
  sample.computed = (now.prompt_tokens - before.prompt_tokens - cached) / seconds;
  if (steps) {
    sample.rows = tokens / steps;
    sample.step = (1000 * (now.device - before.device)) / steps;
  }
  if (tokens) {
    sample.gap = (1000 * (now.gaps.total - before.gaps.total)) / tokens;
    sample.gap99 = 1000 * quantile(0.99, now.gaps.bounds, counts, tokens);
  }
  return sample;
}

/** As Prometheus' histogram_quantile: within its bucket values are taken to be spread evenly. */
function quantile(share, bounds, counts, all) {
  let below = 0;
  for (const [at, count] of counts.entries()) {
    if (count && below + count >= share * all) {
      const from = at ? bounds[at - 1] : 0;
      const to = bounds[at] ?? from;
      return from + ((to - from) * (share * all - below)) / count;
    }
    below += count;
  }
  return 0;
}

/** Of the last minute; null before the first prompt in it. */
function hitRate(now) {
  const from = samples.find((each) => each.t >= now.t - RECENT);
  const queried = now.queried - from.queried;
  return queried > 0 ? (100 * (now.hit - from.hit)) / queried : null;
}

function showPool({ page_size, total, free, cached, protected: locked }) {
  const parts = [
    ["requests", "held by requests alone", total - free - cached - locked],
    ["locked", "in the tree, in use", locked],
    ["cached", "in the tree, can be evicted", cached],
    ["free", "free", free],
  ];
  const told = parts.map(([, text, pages]) => `${plain(pages * page_size)} tokens ${text}`);
  find("pool-bar").ariaLabel = told.join(", ");
  find("pool-bar").replaceChildren(...parts.map(([name, , pages]) => {
    const part = element("span", { className: `part ${name}` });
    part.style.flexGrow = pages;
    return part;
  }));
  find("pool-legend").replaceChildren(...parts.map(([name, text, pages]) =>
    element("li", {}, element("span", { className: `swatch ${name}` }),
      element("strong", {}, plain(pages * page_size)), ` ${text}`)));
}

function showFacts({ model_card: card, version, started_at: started, status }, now) {
  const { cache } = now;
  const reasons = (counts) => Object.entries(counts).map(([reason, n]) => `${plain(n)} ${reason}`).join(", ") || "none";
  const share = cache.queried_tokens ? plain((100 * cache.hit_tokens) / cache.queried_tokens) + " %" : "–";
  const groups = {
    "Radix tree": {
      Nodes: plain(cache.nodes),
      "Cached tokens": plain((cache.cached + cache.protected) * cache.page_size),
      "Pinned tokens": `${plain(cache.pinned * cache.page_size)} in ${plain(cache.pins)} prefixes`,
      "Evicted tokens": plain(cache.evicted_pages * cache.page_size),
      "Hit rate since the start": share,
      "Page": `${cache.page_size} tokens`,
    },
    Since: {
      Steps: plain(now.steps),
      "Prompt tokens": plain(now.prompt_tokens),
      "Output tokens": plain(now.output_tokens),
      Finished: reasons(now.finished),
      Refused: reasons(now.refused),
      Preemptions: plain(now.retractions),
      ...(now.drafted ? { "Drafts accepted": `${plain((100 * now.accepted) / now.drafted)} %` } : {}),
    },
    Server: {
      Model: card.name,
      Architecture: card.architecture,
      Device: `${card.device}, ${card.dtype}` + (now.replicas > 1 ? `, ${now.replicas} replicas` : ""),
      Context: `${plain(card.context_length)} tokens`,
      "Loop lag": `${plain(1000 * now.lag)} ms`,
      Version: `${version}, ${status}`,
    },
  };
  const since = `Since ${new Date(1000 * started).toLocaleString()}`;
  find("facts").replaceChildren(...Object.entries(groups).map(([title, rows]) =>
    element("section", { className: "card" }, element("h2", {}, title === "Since" ? since : title),
      element("dl", {}, ...Object.entries(rows).flatMap(([name, value]) =>
        [element("dt", {}, name), element("dd", {}, value)])))));
}

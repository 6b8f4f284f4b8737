// The conversation: settings and messages to a request, its stream to an answer.

import { Answer } from "./answer.js";
import { ApiError, events, request } from "./api.js";
import { element, find } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const ALTERNATIVES = 5;
const greeting = find("empty");

let messages = [];
let last = null; // the answer whose calls may still get results
let running = null; // the AbortController of the request that runs

/** Fill the list of models. */
export function setModels(models) {
  find("model").replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
  find("greeting").textContent = `Send a message to ${models[0]?.id ?? "the model"}.`;
}

/** Connect the form, the buttons and the keys. */
export function startChat() {
  const message = find("message");
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send(message.value.trim());
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  find("stop-answer").addEventListener("click", () => running?.abort());
  find("new").addEventListener("click", restart);
  find("settings").open = matchMedia("(min-width: 900px)").matches;
}

function restart() {
  running?.abort();
  messages = [];
  last = null;
  find("log").replaceChildren(greeting);
  find("message").focus();
}

/** Send a message, or the results of calls, or both. What fails before anything was answered can be
 * corrected and sent again: it is no part of the conversation. */
async function send(text) {
  const results = last?.results ?? [];
  if (!text && !results.some((each) => each.content)) return;
  const conversation = messages;
  const said = text ? [{ role: "user", content: text }] : [];
  greeting.remove();
  for (const old of document.querySelectorAll("#log > .error")) old.remove();
  let sent;
  try {
    sent = body([...messages, ...results, ...said]);
  } catch (error) {
    show(failure(error));
    return;
  }
  const question = element("article", { className: "user", ariaLabel: "You", hidden: !text }, text);
  const answer = new Answer(find("logprobs").checked);
  show(question, answer.node);
  find("message").value = "";
  const failed = await stream(sent, answer);
  if (conversation !== messages) return; // a new one has begun
  if (failed && answer.empty) {
    question.remove();
    answer.node.remove();
    find("message").value ||= text;
  } else {
    messages.push(...results, ...said, answer.message);
    last?.close();
    last = answer.calls.length ? answer : null;
  }
  if (failed && failed.name !== "AbortError") show(failure(failed));
}

/** The request. Throws `Error` where a field is no JSON. */
function body(said) {
  const sent = { ...json("more", "More fields"), model: find("model").value || undefined };
  for (const name of NUMBERS) {
    const { value, validity } = find(name);
    if (validity.badInput) throw new Error(`${name}: this is no number.`);
    if (value !== "") sent[name] = Number(value);
  }
  const stop = find("stop").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length) sent.stop = stop;
  const tools = json("tools", "Tools");
  if (tools) sent.tools = tools;
  if (find("logprobs").checked) Object.assign(sent, { logprobs: true, top_logprobs: ALTERNATIVES });
  const system = find("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return { ...sent, messages: [...first, ...said], stream: true, stream_options: { include_usage: true } };
}

function json(id, name) {
  const text = find(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: this is no JSON (${error.message}).`);
  }
}

/** Show the answer to a request. Returns the error that ended it, an `AbortError` if it was stopped, or null. */
async function stream(sent, answer) {
  running = new AbortController();
  busy(true);
  const clock = { begun: performance.now(), first: 0, finish: "", usage: null };
  try {
    const response = await request("v1/chat/completions", { body: sent, signal: running.signal });
    for await (const { choices, usage } of events(response)) {
      clock.usage = usage ?? clock.usage;
      const choice = choices.find(({ index }) => index === 0);
      if (!choice) continue;
      clock.first ||= performance.now();
      clock.finish = choice.finish_reason ?? clock.finish;
      follow(() => answer.take(choice));
    }
    return null;
  } catch (error) {
    clock.finish = error.name === "AbortError" ? "stopped" : "failed";
    return error;
  } finally {
    follow(() => answer.end(summary(clock)));
    running = null;
    busy(false);
  }
}

function summary({ begun, first, finish, usage }) {
  const parts = [finish];
  if (first) parts.push(`first token after ${((first - begun) / 1000).toFixed(2)} s`);
  if (usage) {
    const seconds = (performance.now() - first) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${usage.prompt_tokens} prompt tokens, ${cached} cached`, `${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && seconds > 0.05) {
      parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
  }
  return parts.filter(Boolean).join(" · ");
}

function failure(error) {
  const { type, param, code } = error instanceof ApiError ? error.fields : {};
  const details = [error.status || "", type, param && `field ${param}`, code].filter(Boolean).join(" · ");
  return element("div", { className: "error", attributes: { role: "alert" } },
    element("p", {}, error.message), element("p", { className: "note" }, details));
}

function busy(now) {
  find("stop-answer").hidden = !now;
  find("send").hidden = now;
}

function show(...nodes) {
  find("log").append(...nodes);
  find("log").scrollTop = find("log").scrollHeight;
}

/** Keep the end in view, unless the reader has scrolled away from it. */
function follow(change) {
  const log = find("log");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (near) requestAnimationFrame(() => (log.scrollTop = log.scrollHeight));
}

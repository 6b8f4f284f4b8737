// One answer: its text, reasoning, tool calls and tokens, shown while it streams.

import { element, find } from "./dom.js";

/** Text and code in the order of `text`: what is between two fences of ``` is code. */
export function blocks(text) {
  const found = [];
  let current = null;
  for (const line of text.split("\n")) {
    const fence = /^\s*```([^`]*)$/.exec(line);
    if (fence && current?.code) current = null;
    else if (fence) found.push((current = { code: true, language: fence[1].trim(), lines: [] }));
    else {
      if (!current) found.push((current = { code: false, language: "", lines: [] }));
      current.lines.push(line);
    }
  }
  return found
    .map(({ code, language, lines }) => ({ code, language, text: code ? lines.join("\n") : lines.join("\n").trim() }))
    .filter((block) => block.code || block.text);
}

/** Nodes for text with fenced code. Only those change whose text has changed. */
class Text {
  constructor() {
    this.node = element("div", { className: "text" });
    this._shown = [];
  }

  show(text) {
    const found = blocks(text);
    found.forEach((block, at) => {
      const shown = this._shown[at];
      if (shown?.code !== block.code || shown.language !== block.language) this._replace(at, block);
      else if (shown.text !== block.text) this._target(at).textContent = block.text;
    });
    while (this.node.children.length > found.length) this.node.lastChild.remove();
    this._shown = found;
  }

  _replace(at, { code, language, text }) {
    const node = code
      ? element("pre", { data: { language }, tabIndex: 0 }, element("code", {}, text))
      : element("p", {}, text);
    const old = this.node.children[at];
    if (old) old.replaceWith(node);
    else this.node.append(node);
  }

  _target(at) {
    const node = this.node.children[at];
    return node.firstElementChild ?? node;
  }
}

/** The answer that streams into the conversation. */
export class Answer {
  /** `probabilities`: the text is shown as the tokens that the model made, its marks among them. */
  constructor(probabilities) {
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this._text = new Text();
    this._tokens = probabilities ? tokenList() : null;
    this._decoder = new TextDecoder(); // a character may be of several tokens: it is shown with its last one
    this._thoughts = null;
    this._due = 0;
    this._body = element("div", { className: "body" }, this._tokens ?? this._text.node);
    this._note = element("p", { className: "note" });
    const about = { className: "assistant", ariaBusy: "true", ariaLabel: "Answer" };
    this.node = element("article", about, this._body, this._note);
  }

  get empty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  /** The message for the next request. */
  get message() {
    const calls = this.calls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
    return { role: "assistant", content: this.content, ...(calls.length ? { tool_calls: calls } : {}) };
  }

  /** Results that were typed into the blocks of calls, as messages. */
  get results() {
    return this.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result.value }));
  }

  /** The results are sent. */
  close() {
    for (const { result } of this.calls) result.readOnly = true;
  }

  /** One chunk's choice. */
  take({ delta, logprobs }) {
    this.reasoning += delta.reasoning_content ?? "";
    this.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) this._call(call);
    for (const token of logprobs?.content ?? []) this._tokens?.append(tokenNode(token, this._decoder));
    this._due ||= requestAnimationFrame(() => this._show());
  }

  /** Nothing follows. */
  end(note) {
    cancelAnimationFrame(this._due);
    this._show();
    if (this._thoughts) this._thoughts.open = !this.content && !this.calls.length;
    this._note.textContent = note;
    this.node.ariaBusy = "false";
  }

  _show() {
    this._due = 0;
    if (this.reasoning && !this._thoughts) {
      const title = element("summary", {}, "Reasoning");
      this._thoughts = element("details", { className: "reasoning", open: true }, title, element("p"));
      this._body.prepend(this._thoughts);
    }
    if (this._thoughts) this._thoughts.lastChild.textContent = this.reasoning.trim();
    if (!this._tokens) this._text.show(this.content);
    for (const call of this.calls) call.shown.textContent = pretty(call.arguments);
  }

  _call({ index, id, function: { name, arguments: text = "" } = {} }) {
    this.calls[index] ??= this._opened(id, name);
    this.calls[index].arguments += text;
  }

  _opened(id, name) {
    const shown = element("code");
    const result = element("input", { placeholder: "Result, for the next message", ariaLabel: `Result of ${name}` });
    this._body.append(
      element("section", { className: "call", ariaLabel: "Tool call" },
        element("h3", {}, element("span", {}, "Tool call"), name), element("pre", { tabIndex: 0 }, shown), result),
    );
    return { id, name, arguments: "", shown, result };
  }
}

/** Arguments with indentation, as soon as they are complete. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// -- tokens and their probabilities ------------------------------------------------------------------

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣") || "∅";

function tokenNode({ token, bytes, logprob, top_logprobs: others = [] }, decoder) {
  const likely = Math.exp(logprob);
  const level = likely > 0.9 ? 0 : likely > 0.6 ? 1 : likely > 0.3 ? 2 : likely > 0.1 ? 3 : 4;
  const text = decoder.decode(Uint8Array.from(bytes), { stream: true });
  const node = element("span", { className: `token unlikely-${level}` }, text);
  node.alternatives = [{ token, logprob }, ...others.filter((other) => other.token !== token)];
  return node;
}

/** One stop of the Tab key for all tokens; arrow keys go from one to the next. */
function tokenList() {
  const list = element("div", { className: "tokens", tabIndex: 0, ariaLabel: "Tokens, arrow keys show probabilities" });
  let at = -1;
  const go = (to) => {
    at = Math.max(0, Math.min(to, list.children.length - 1));
    if (list.children[at]) tell(list.children[at]);
  };
  list.addEventListener("mouseover", ({ target }) => target.alternatives && tell(target));
  list.addEventListener("mouseleave", hide);
  list.addEventListener("blur", hide);
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    go(at + step);
  });
  return list;
}

function tell(token) {
  hide();
  const tip = find("tip");
  token.classList.add("told");
  const rows = token.alternatives.map(({ token: text, logprob }, at) =>
    element("tr", { className: at ? "" : "chosen" },
      element("td", {}, visible(text)), element("td", {}, percent(logprob))));
  tip.replaceChildren(element("table", {}, element("tbody", {}, ...rows)));
  tip.hidden = false;
  const box = token.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - tip.offsetWidth - 8);
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

function hide() {
  find("tip").hidden = true;
  document.querySelector(".token.told")?.classList.remove("told");
}

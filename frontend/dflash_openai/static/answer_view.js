// One answer on the page: reasoning, coloured text, tool calls, an error, and a line of figures.

import { explain } from "./api.js";
import { announce, button, copy, element, number } from "./dom.js";
import { figures } from "./answer.js";
import { summary } from "./live.js";
import { render } from "./markdown.js";
import { RunText, describeStep } from "./runs.js";

const STATES = {
  stopped: "Stopped. What had arrived is kept.",
  interrupted: "Interrupted by a reload. What had arrived is kept.",
};
const FINISHES = {
  length: "Ended at the limit of tokens.",
  abort: "Ended by the server's time limit.",
  content_filter: "Ended by a filter.",
};

export class AnswerView {
  /**
   * `actions`: retry(), onSettings(field), onShow(answer), onToolResults(results). `label` is the heading of an answer
   * in a comparison.
   */
  constructor(answer, actions, label = null) {
    this.answer = answer;
    this.actions = actions;
    this._queue = [];
    this._frame = null;
    this._step = -1;
    this._timer = null;
    this._shown = { runs: true, numbers: false };
    this._isCompared = label !== null;
    this.reasoning = element("div", { class: "runs" });
    this.thoughts = element("details", { class: "reasoning", open: answer.isOpen, hidden: true }, element("summary", {}, "Reasoning"), this.reasoning);
    this.body = element("div", {
      class: "runs body",
      tabindex: "0",
      role: "group",
      "aria-label": `${label ?? "Answer"}; left and right arrow go through its steps`,
      onkeydown: (event) => this._onKey(event),
    });
    this.formatted = element("div", { class: "formatted-text", hidden: true });
    this.extra = element("div", { class: "extra" });
    this.figures = element("p", { class: "summary" });
    this.node = element("div", { class: "answer", role: "group", "aria-label": label ?? "Answer" });
    if (label) this.node.append(element("p", { class: "answer-label" }, label));
    this.node.append(this.thoughts, this.body, this.formatted, this.extra, this.figures);
    this._text = { content: new RunText(this.body), reasoning: new RunText(this.reasoning) };
    this.node.addEventListener("focusin", () => actions.onShow(answer));
    this._draw(answer.pieces());
    this._finish();
  }

  /** Draws new pieces in the next frame: however fast steps come, the page is laid out once a frame. */
  add(pieces) {
    this._queue.push(...pieces);
    this._frame ??= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this._frame);
    this._frame = null;
    this._draw(this._queue.splice(0));
    this._mark();
  }

  /** The answer's state has changed. */
  changed() {
    this.flush();
    this._finish();
  }

  _draw(pieces) {
    for (const piece of pieces) this._text[piece.kind].add(piece);
    if (this.answer.reasoning) this.thoughts.hidden = false;
    if (this.answer.content && this.answer.reasoning && this.answer.isOpen && !this._folded) {
      this._folded = true;
      this.thoughts.open = false;
    }
  }

  _mark() {
    const { state, content, toolCalls } = this.answer;
    this.node.dataset.state = state;
    this.node.setAttribute("aria-busy", String(this.answer.isOpen));
    this.body.hidden = !this.formatted.hidden || (!content && (toolCalls.length > 0 || !this.answer.isOpen));
    this.figures.textContent = summary(this.answer);
  }

  _finish() {
    clearInterval(this._timer);
    const { state, finishReason, toolCalls, error } = this.answer;
    this.format(this._shown);
    this.extra.replaceChildren();
    if (toolCalls.length) this.extra.append(...this._toolCalls());
    const note = STATES[state] ?? (state === "done" ? FINISHES[finishReason] : null);
    if (note) this.extra.append(element("p", { class: "note" }, note));
    if (error) this.extra.append(this._error(error));
    if (state === "done" && !this.answer.content && !toolCalls.length && !error)
      this.extra.append(element("p", { class: "note" }, "The answer is empty."));
    const format = this.answer.request?.response_format;
    if (state === "done" && format && finishReason === "stop") this.extra.append(jsonBadge(this.answer.content));
  }

  _toolCalls() {
    const { toolCalls, isOpen, state } = this.answer;
    const inputs = [];
    const nodes = toolCalls.map((call, index) => {
      const input = element("textarea", { rows: "2", class: "code", "aria-label": `Result of ${call.name}`, placeholder: "What the function returns" });
      inputs.push(input);
      return element(
        "div",
        { class: "tool-call" },
        element("p", {}, element("b", {}, call.name || `call ${index + 1}`), element("span", { class: "tag" }, "tool call")),
        element("pre", {}, pretty(call.arguments)),
        this.actions.onToolResults && !isOpen ? input : null,
      );
    });
    if (this.actions.onToolResults && state === "done") {
      const send = () =>
        this.actions.onToolResults(toolCalls.map(({ id }, index) => ({ role: "tool", tool_call_id: id, content: inputs[index].value })));
      nodes.push(button(toolCalls.length > 1 ? "Send results" : "Send result", "up", send));
    }
    return nodes;
  }

  _error(error) {
    const { title, hint, field } = explain(error);
    const actions = element("p", { class: "row" });
    if (field) actions.append(button("Enter API key", null, () => this.actions.onSettings(field)));
    if (this.actions.retry) actions.append(this._retryButton(error.retryAfter));
    return element("div", { class: "error", role: "alert" }, element("b", {}, title), element("p", {}, error.message), hint && element("p", {}, hint), actions);
  }

  /** A button that counts down the seconds that the server asked for. */
  _retryButton(seconds) {
    const retry = button("Retry", "retry", () => this.actions.retry());
    let left = Math.ceil(seconds ?? 0);
    const show = () => {
      retry.disabled = left > 0;
      retry.lastChild.textContent = left > 0 ? `Retry in ${left} s` : "Retry";
      if (left-- <= 0) clearInterval(this._timer);
    };
    show();
    if (left >= 0) this._timer = setInterval(show, 1000);
    return retry;
  }

  /**
   * Shows the text formatted in place of its steps, once it is complete, or the steps again. Steps without drafts have
   * no colours: such a text is formatted unless their numbers are asked for, or it stands beside one with drafts.
   */
  format(shown) {
    this._shown = shown;
    const { steps, isOpen, content } = this.answer;
    const isPlain = !this._isCompared && !shown.numbers && steps.every(([, drafts]) => drafts === 0);
    const shows = (isPlain || !shown.runs) && !isOpen && content !== "";
    if (shows && !this.formatted.childElementCount) this.formatted.append(...render(this.answer.content));
    this.formatted.hidden = !shows;
    this._mark();
  }

  copy(node) {
    copy(this.answer.content, node);
  }

  _onKey(event) {
    if (event.target !== this.body) return;
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !this.answer.steps.length) return;
    event.preventDefault();
    this._step = Math.max(0, Math.min(this.answer.steps.length - 1, this._step + by));
    for (const run of this.node.querySelectorAll(".run.now")) run.classList.remove("now");
    const runs = this.node.querySelectorAll(`.run[data-step="${this._step}"]`);
    for (const run of runs) run.classList.add("now");
    const words = describeStep(this.answer, this._step);
    announce(`${words}: ${[...runs].map((run) => run.textContent).join("")}`);
    if (runs[0]) showTip(runs[0], words);
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function jsonBadge(text) {
  try {
    JSON.parse(text);
    return element("p", { class: "badge good" }, "✓ parses as JSON");
  } catch (error) {
    return element("p", { class: "badge bad" }, `✗ does not parse: ${error.message}`);
  }
}

let tip = null;

/** Shows what a step did beside its text. */
export function showTip(run, words) {
  tip ??= document.body.appendChild(element("div", { class: "tip", "aria-hidden": "true" }));
  tip.textContent = words;
  tip.hidden = false;
  const at = run.getClientRects()[0];
  if (!at) return;
  const left = Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8));
  const above = at.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : at.bottom + 6}px`;
}

export function hideTip() {
  if (tip) tip.hidden = true;
}

function wholeText({ reasoning, content, toolCalls }) {
  const calls = toolCalls.map(({ name, arguments: text }) => `${name}(${text})`);
  return [reasoning, content, ...calls].filter((text) => text).join("\n");
}

/**
 * What a comparison has shown, once both answers are there: {isEqual, words}. Where texts differ, at which character.
 */
export function verdict([fast, plain]) {
  if (fast.state !== "done" || plain.state !== "done") return null;
  const [a, b] = [figures(fast), figures(plain)];
  const texts = [fast, plain].map(wholeText);
  const hasIds = fast.tokenIds?.length === a.numTokens && plain.tokenIds?.length === b.numTokens && a.numTokens > 0;
  const isEqual = texts[0] === texts[1] && (!hasIds || fast.tokenIds.every((id, index) => id === plain.tokenIds[index]));
  const parts = [];
  if (isEqual) parts.push(hasIds ? "Same text, token for token" : "Same text");
  else {
    let at = 0;
    while (at < texts[0].length && texts[0][at] === texts[1][at]) at += 1;
    parts.push(`Texts differ from character ${(at + 1).toLocaleString("en")} on`);
  }
  if (a.numSteps && b.numSteps) parts.push(`${a.numSteps} instead of ${b.numSteps} steps`);
  if (a.tokensPerSecond && b.tokensPerSecond) parts.push(`${number(a.tokensPerSecond / b.tokensPerSecond)}× the tokens/s`);
  return { isEqual, words: parts.join(" · ") };
}

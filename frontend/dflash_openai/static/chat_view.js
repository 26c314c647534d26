// The conversation on the page, turn by turn.

import { AnswerView, hideTip, showTip, verdict } from "./answer_view.js";
import { button, byId, copy, element } from "./dom.js";
import { describeStep } from "./runs.js";

const NEAR_END = 80; // pixels from the end within which new text keeps the end in view

export class ChatView {
  /** `actions`: retry(turn), edit(turn, text), toolResults(turn, results), onSettings(field), onShow(answer). */
  constructor(chat, actions) {
    this.chat = chat;
    this.actions = actions;
    this.log = byId("log");
    this.views = new Map(); // of answers
    this.nodes = new Map(); // of turns
    this._shown = { runs: true, numbers: false };
    this._followsEnd = true;
    this._lastTop = 0;
    this._scroll = byId("scroll");
    this._scroll.addEventListener("scroll", () => this._onScroll(), { passive: true });
    byId("to-end").addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this._follow()).observe(this.log);
    for (const type of ["pointerover", "click"]) this.log.addEventListener(type, (event) => this._onPoint(event));
    this.log.addEventListener("pointerleave", hideTip);
    this.log.addEventListener("focusout", hideTip);
  }

  /** Draws what has changed in the list of turns. */
  draw() {
    const { turns } = this.chat;
    for (const [turn, node] of this.nodes) {
      if (turns.includes(turn)) continue;
      node.remove();
      this.nodes.delete(turn);
      for (const answer of turn.answers ?? []) this.views.delete(answer);
    }
    for (const turn of turns) {
      if (this.nodes.has(turn)) continue;
      const node = turn.role === "assistant" ? this._assistant(turn) : this._said(turn);
      this.nodes.set(turn, node);
      this.log.append(node);
    }
    byId("welcome").hidden = turns.length > 0;
  }

  /** An answer has new pieces of text. */
  add(answer, pieces) {
    this.views.get(answer)?.add(pieces);
  }

  /** An answer has ended, or its turn's other one has. */
  changed(turn, answer) {
    this.views.get(answer)?.changed();
    this._showVerdict(turn);
  }

  /** Shows coloured steps or formatted text, and the numbers of the steps or not. */
  show(shown) {
    this._shown = shown;
    this.log.classList.toggle("numbers", shown.numbers);
    for (const view of this.views.values()) view.format(shown);
  }

  toEnd() {
    this._followsEnd = true;
    this._follow();
  }

  _onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this._scroll;
    // Only a person scrolls up. Farther from the end than before may also mean that text has come since.
    if (scrollTop < this._lastTop) this._followsEnd = false;
    if (scrollHeight - scrollTop - clientHeight < NEAR_END) this._followsEnd = true;
    this._lastTop = scrollTop;
    byId("to-end").hidden = this._followsEnd;
    hideTip();
  }

  _follow() {
    if (this._followsEnd) this._scroll.scrollTop = this._scroll.scrollHeight;
  }

  _onPoint(event) {
    const run = event.target.closest?.(".run");
    const view = run && [...this.views.values()].find(({ node }) => node.contains(run));
    if (view) showTip(run, describeStep(view.answer, Number(run.dataset.step)));
    else hideTip();
  }

  _said(turn) {
    const text = element("p", { class: "text" }, turn.content);
    const isUser = turn.role === "user";
    const node = element("article", { class: `turn ${turn.role}`, "aria-label": isUser ? "You" : "Result of a tool" });
    if (!isUser) node.append(element("span", { class: "tag" }, "tool result"));
    node.append(text);
    const actions = element("div", { class: "turn-actions" });
    if (isUser) actions.append(button("Edit", "edit", () => this.startEdit(turn)));
    actions.append(button("Copy", "copy", (event) => copy(turn.content, event.currentTarget)));
    node.append(actions);
    return node;
  }

  /** Puts a field in place of a prompt; sending it drops what came after. */
  startEdit(turn) {
    const node = this.nodes.get(turn);
    if (node.querySelector("form")) return;
    const field = element("textarea", { "aria-label": "Edit the message", rows: String(Math.min(10, turn.content.split("\n").length + 1)) });
    field.value = turn.content;
    const end = () => {
      form.remove();
      node.classList.remove("editing");
      byId("prompt").focus();
    };
    const form = element("form", { class: "edit" }, field, element("div", { class: "row" }, element("button", { class: "primary" }, "Send"), button("Cancel", null, end)));
    const send = () => {
      const text = field.value.trim();
      if (text) this.actions.edit(turn, text);
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    node.classList.add("editing");
    node.append(form);
    field.focus();
  }

  _assistant(turn) {
    const isCompared = turn.answers.length > 1;
    const node = element("article", { class: `turn assistant${isCompared ? " compared" : ""}`, "aria-label": "Assistant" });
    const columns = element("div", { class: "columns" });
    for (const answer of turn.answers) {
      const label = isCompared ? (answer.speculative ? "With drafts" : "Drafts off") : null;
      const isFirst = answer === turn.answers[0];
      const view = new AnswerView(
        answer,
        {
          retry: () => this.actions.retry(turn),
          onSettings: this.actions.onSettings,
          onShow: this.actions.onShow,
          onToolResults: isFirst ? (results) => this.actions.toolResults(turn, results) : null,
        },
        label,
      );
      view.format(this._shown);
      this.views.set(answer, view);
      columns.append(view.node);
    }
    const isSeedShown = turn.answers[0].request?.seed;
    node.append(
      columns,
      element("p", { class: "verdict", role: "status" }),
      element(
        "div",
        { class: "turn-actions" },
        button("Retry", "retry", () => this.actions.retry(turn), { class: "small again" }),
        button("Copy", "copy", (event) => this.views.get(turn.answers[0]).copy(event.currentTarget)),
        isSeedShown === undefined ? null : element("span", { class: "seed" }, `seed ${isSeedShown}`),
      ),
    );
    this.nodes.set(turn, node);
    this._showVerdict(turn);
    return node;
  }

  _showVerdict(turn) {
    const node = this.nodes.get(turn)?.querySelector(".verdict");
    const result = turn.answers.length > 1 ? verdict(turn.answers) : null;
    if (!node || !result) return;
    node.textContent = `${result.isEqual ? "✓" : "≠"} ${result.words}`;
    node.dataset.equal = String(result.isEqual);
  }
}

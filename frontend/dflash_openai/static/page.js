// What surrounds the chat: the prompt, the header, the panel, colours, and the server's state.

import { byId, button, element, announce } from "./dom.js";
import { prompt, storedSettings } from "./store.js";

const HEALTH_EVERY_MS = 10000;
const THEMES = ["auto", "light", "dark"];
const THEME_NAMES = { auto: "as the system", light: "light", dark: "dark" };
const EXAMPLES = [
  ["Reason", "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"],
  ["Code", "Write a Python function named `long_titles` that returns a list of the titles that are longer than 4 letters."],
  ["List", "What are the capitals of Norway, Hungary, Portugal and Japan?"],
  ["Compare", "Erik has 11 cards. Omar brings 16 more cards, and then Erik loses 21 cards. How many cards are left?"],
];
// A sentence as a stream of steps would colour it: the text of each step and its tokens.
const SAMPLE = [["Each", 1], [" colour is one step", 4], [" of the model:", 3], [" here", 1], [" six tokens were accepted at once", 6], [".", 1]];

export class Page {
  /** `actions`: send(text), stop(), editLast(), newChat(), onModel(card), chat. */
  constructor(api, actions) {
    this.api = api;
    this.actions = actions;
    this.isBusy = false;
    this.cards = [];
    this._wirePrompt();
    this._wirePanel();
    this._wireTheme();
    byId("new-chat").addEventListener("click", () => {
      actions.newChat();
      byId("prompt").focus();
    });
    byId("export").addEventListener("click", () => this._export());
    byId("model").addEventListener("change", () => this._choose());
    byId("api-key").addEventListener("change", () => this.checkHealth());
    this._fillWelcome();
  }

  start() {
    this._grow();
    this.checkHealth();
    setInterval(() => document.visibilityState === "visible" && !this.isBusy && this.checkHealth(), HEALTH_EVERY_MS);
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    if (hadFocus) (isBusy ? byId("stop") : byId("prompt")).focus();
  }

  /** Opens the panel, where it is folded away, and goes to a field. */
  openSetting(field) {
    const input = byId(field);
    for (let at = input.closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
    this._setPanel(true);
    input.focus();
  }

  /** Asks the server how it is, and for its models. */
  async checkHealth() {
    try {
      await this.api.isReady();
      await this._loadModels();
      this._showHealth("ready");
    } catch (error) {
      this._showHealth(error.status === 0 ? "unreachable" : error.status === 401 ? "API key needed" : "not ready");
    }
  }

  async _loadModels() {
    const cards = await this.api.models();
    if (JSON.stringify(cards.map(({ id }) => id)) === JSON.stringify(this.cards.map(({ id }) => id))) return;
    this.cards = cards;
    const select = byId("model");
    const chosen = storedSettings.get().model;
    select.replaceChildren(...cards.map(({ id }) => element("option", { value: id, selected: id === chosen }, id)));
    select.disabled = cards.length === 0;
    this._choose();
  }

  _choose() {
    const id = byId("model").value;
    storedSettings.set({ ...storedSettings.get(), model: id });
    this.actions.onModel(this.cards.find((card) => card.id === id));
  }

  _showHealth(state) {
    const dot = byId("health");
    if (dot.dataset.state === state) return;
    dot.dataset.state = state;
    dot.title = `Server: ${state}`;
    dot.setAttribute("aria-label", dot.title);
    if (!this.cards.length) byId("model").firstElementChild.textContent = state === "ready" ? "no model" : state;
  }

  _wirePrompt() {
    const field = byId("prompt");
    field.addEventListener("input", () => {
      prompt.set(field.value);
      this._grow();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this._send();
      } else if (event.key === "ArrowUp" && field.value === "" && !this.isBusy) {
        event.preventDefault();
        this.actions.editLast();
      }
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this._send();
    });
    byId("stop").addEventListener("click", () => this.actions.stop());
    document.addEventListener("keydown", (event) => this._onKey(event));
  }

  _onKey(event) {
    if (event.defaultPrevented || byId("code").open) return;
    const inField = event.target.closest?.("input, textarea, select");
    if (event.key === "Escape") {
      if (this._isPanelOver && byId("panel").classList.contains("open")) this._setPanel(false);
      else if (this.isBusy) this.actions.stop();
    } else if (event.key === "/" && !inField && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      byId("prompt").focus();
    }
  }

  _send(text = byId("prompt").value) {
    if (this.isBusy || !text.trim() || !this.actions.send(text.trim())) return;
    byId("prompt").value = "";
    prompt.set("");
    this._grow();
  }

  /** The field is as high as its text, within its largest height. */
  _grow() {
    const field = byId("prompt");
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight}px`;
  }

  get _isPanelOver() {
    return matchMedia("(max-width: 60rem)").matches;
  }

  _wirePanel() {
    byId("panel-toggle").addEventListener("click", () => this._setPanel(!byId("panel").classList.contains("open")));
    byId("panel-close").addEventListener("click", () => this._setPanel(false));
    byId("backdrop").addEventListener("click", () => this._setPanel(false));
    matchMedia("(max-width: 60rem)").addEventListener("change", () => this._setPanel(false));
  }

  /** Beside the chat on a wide page; over it, with the rest out of reach, on a narrow one. */
  _setPanel(isOpen) {
    const isOver = this._isPanelOver && isOpen;
    byId("panel").classList.toggle("open", isOver);
    byId("backdrop").hidden = !isOver;
    byId("main").inert = isOver;
    byId("panel-toggle").setAttribute("aria-expanded", String(isOver));
    if (isOver) byId("panel-close").focus();
    else if (this._isPanelOver && byId("panel").contains(document.activeElement)) byId("panel-toggle").focus();
  }

  _wireTheme() {
    const show = (theme) => {
      document.documentElement.dataset.theme = theme;
      byId("theme").setAttribute("aria-label", `Colours: ${THEME_NAMES[theme]}`);
      byId("theme").title = `Colours: ${THEME_NAMES[theme]}`;
      dispatchEvent(new Event("themechange"));
    };
    show(storedSettings.get().theme ?? "auto");
    byId("theme").addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
      storedSettings.set({ ...storedSettings.get(), theme: next });
      show(next);
      announce(`Colours: ${THEME_NAMES[next]}`);
    });
  }

  _fillWelcome() {
    const list = byId("examples");
    for (const [name, text] of EXAMPLES) {
      const send = () => {
        if (name === "Compare" && !byId("compare").checked) byId("compare").click();
        this._send(text);
      };
      const node = button("", null, send, { class: "example" });
      node.append(element("b", {}, name), element("span", {}, text));
      list.append(element("li", {}, node));
    }
    byId("welcome-legend").append(...SAMPLE.map(([text, n]) => element("span", { class: `run s${n - 1}`, "data-n": n }, text)));
  }

  _export() {
    const blob = new Blob([JSON.stringify({ turns: this.actions.chat.turns }, null, 1)], { type: "application/json" });
    const link = element("a", { href: URL.createObjectURL(blob), download: "chat.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
}

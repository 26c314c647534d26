// What outlives a reload: the chat and the API key in this tab, the settings in this browser.

import { Answer } from "./answer.js";

const CHAT = "dflash.chat";
const KEY = "dflash.key";
const PROMPT = "dflash.prompt";
const SETTINGS = "dflash.settings";
const SAVE_EVERY_MS = 1000;

function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null;
  }
}

/** False where the browser has no space or no storage: the page then works without. */
function write(storage, name, value) {
  try {
    if (value === null || value === "") storage.removeItem(name);
    else storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const apiKey = {
  get: () => read(sessionStorage, KEY) ?? "",
  set: (value) => write(sessionStorage, KEY, value),
};

export const prompt = {
  get: () => read(sessionStorage, PROMPT) ?? "",
  set: (value) => write(sessionStorage, PROMPT, value),
};

export const storedSettings = {
  get: () => read(localStorage, SETTINGS) ?? {},
  set: (value) => write(localStorage, SETTINGS, value),
};

/**
 * The conversation: a list of turns, {role: "user", content}, {role: "tool", content, tool_call_id} or
 * {role: "assistant", answers}, where a comparison has two answers and the first one is what goes on.
 */
export class Chat {
  constructor() {
    this.turns = read(sessionStorage, CHAT)?.turns ?? [];
    this._timer = null;
    for (const turn of this.turns) {
      turn.answers = turn.answers?.map((fields) => {
        const answer = new Answer(fields);
        if (answer.isOpen) answer.state = "interrupted";
        return answer;
      });
    }
    // A page that is left loses its stream. What is kept is the state before that, so that it reads as interrupted.
    this._isLeft = false;
    addEventListener("pagehide", () => {
      this.save();
      this._isLeft = true;
    });
    addEventListener("pageshow", () => (this._isLeft = false));
  }

  add(turn) {
    this.turns.push(turn);
    this.save();
    return turn;
  }

  /** Removes a turn and all after it. */
  truncate(turn) {
    const index = this.turns.indexOf(turn);
    if (index >= 0) this.turns.length = index;
    this.save();
  }

  clear() {
    this.turns = [];
    this.save();
  }

  /** The messages of a request that answers after `turns`. */
  messages(system, turns = this.turns) {
    const messages = turns.map(({ role, content, tool_call_id, answers }) => {
      if (role === "assistant") return answers[0].message();
      return role === "tool" ? { role, content, tool_call_id } : { role, content };
    });
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  save() {
    clearTimeout(this._timer);
    this._timer = null;
    if (this._isLeft) return;
    write(sessionStorage, CHAT, this.turns.length ? { turns: this.turns } : null);
  }

  /** Saves within a second: an answer that streams changes at each step. */
  saveSoon() {
    this._timer ??= setTimeout(() => this.save(), SAVE_EVERY_MS);
  }
}

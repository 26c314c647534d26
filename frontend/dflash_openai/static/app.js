// The playground: puts the parts together and runs the turns of a chat.

import { Answer } from "./answer.js";
import { Api, ApiError, explain } from "./api.js";
import { ChatView } from "./chat_view.js";
import { CodeDialog } from "./code_dialog.js";
import { announce, byId, setLongestDraft } from "./dom.js";
import { LivePanel, summary } from "./live.js";
import { Page } from "./page.js";
import { FieldError, Settings } from "./settings.js";
import { Chat, apiKey, prompt } from "./store.js";

const MAX_SEED = 2 ** 31;

class Playground {
  constructor() {
    this.api = new Api(() => apiKey.get());
    this.chat = new Chat();
    this.live = new LivePanel();
    this.settings = new Settings(() => this.view.show(this.settings.view));
    this.page = new Page(this.api, {
      send: (text) => this.send(text),
      stop: () => this.stop(),
      editLast: () => this.editLast(),
      newChat: () => this.newChat(),
      onModel: (card) => this.onModel(card),
      chat: this.chat,
    });
    this.view = new ChatView(this.chat, {
      retry: (turn) => this.retry(turn),
      edit: (turn, text) => this.edit(turn, text),
      toolResults: (turn, results) => this.answer(results),
      onSettings: (field) => this.page.openSetting(field),
      onShow: (answer) => this.live.show(answer),
    });
    this.code = new CodeDialog(() => this.currentBody());
    this.running = null;
    this.view.show(this.settings.view);
    this.view.draw();
    const last = this.chat.turns.findLast((turn) => turn.answers);
    if (last) this.live.show(last.answers[0]);
    else this.live.update();
  }

  onModel(card) {
    const k = card?.num_speculative_tokens ?? null;
    this.settings.setMaxDrafts(k);
    this.live.maxDrafts = k;
    setLongestDraft(k);
    this.live.maxModelLen = card?.max_model_len ?? null;
    this.live.update();
  }

  newChat() {
    this.stop();
    this.chat.clear();
    this.view.draw();
    this.live.show(null);
    announce("New chat");
  }

  /** The body that would be sent now, or null where a field cannot be read; that field then says so. */
  currentBody() {
    const text = byId("prompt").value.trim();
    const messages = this.chat.messages(this.settings.system);
    if (text || !messages.some(({ role }) => role !== "system")) messages.push({ role: "user", content: text || "Hello" });
    return this._body(messages);
  }

  _body(messages) {
    try {
      return this.settings.body(byId("model").value, messages);
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this.page.openSetting(error.field);
      this.settings.showError(error);
      return null;
    }
  }

  /** Sends a prompt; false where it was not sent. */
  send(text) {
    return this.answer([{ role: "user", content: text }]);
  }

  editLast() {
    const turn = this.chat.turns.findLast(({ role }) => role === "user");
    if (turn) this.view.startEdit(turn);
  }

  edit(turn, text) {
    this.stop();
    this.chat.truncate(turn);
    this.view.draw();
    this.send(text);
  }

  retry(turn) {
    this.stop();
    this.chat.truncate(turn);
    this.view.draw();
    this.answer([]);
  }

  /** Adds turns and asks for an answer to them; false where it was not asked for. */
  answer(turns) {
    if (this.running) return false;
    const body = this._body(this.chat.messages(this.settings.system, [...this.chat.turns, ...turns]));
    if (!body) return false;
    for (const turn of turns) this.chat.add(turn);
    const turn = this.chat.add({ role: "assistant", answers: this._answers(body) });
    this.view.draw();
    this.view.toEnd();
    this._run(turn);
    return true;
  }

  /** One answer, or the two of a comparison: with the same seed, and neither behind the other's cached prompt. */
  _answers(body) {
    if (!this.settings.compares) return [new Answer({ request: body, speculative: body.num_speculative_tokens !== 0 })];
    const common = { ...body };
    if (this.settings.samples) common.seed ??= Math.floor(Math.random() * MAX_SEED);
    const drafts = body.num_speculative_tokens || undefined;
    return [true, false].map((speculative) => {
      const request = { ...common, num_speculative_tokens: speculative ? drafts : 0, cache_salt: crypto.randomUUID?.() ?? String(Math.random()) };
      return new Answer({ request, speculative, tokenIds: [] });
    });
  }

  async _run(turn) {
    const controller = new AbortController();
    this.running = controller;
    this.page.setBusy(true);
    announce("Answering");
    const run = (answer) => this._stream(turn, answer, controller.signal);
    if (this.settings.together) await Promise.all(turn.answers.map(run));
    else for (const answer of turn.answers) await run(answer);
    this.chat.save();
    // A retry has begun another answer meanwhile, which has the page now.
    if (this.running && this.running !== controller) return;
    this.running = null;
    this.page.setBusy(false);
    this.live.show(turn.answers[0]);
    this._announceEnd(turn.answers[0]);
  }

  _announceEnd(answer) {
    if (answer.state === "error") announce(`${explain(answer.error).title}: ${answer.error.message}`);
    else announce(`${answer.content.slice(0, 2000)} — ${answer.state === "stopped" ? "stopped. " : ""}${summary(answer)}`);
  }

  async _stream(turn, answer, signal) {
    const began = performance.now();
    if (!signal.aborted) this.live.show(answer);
    try {
      if (signal.aborted) throw new DOMException("stopped", "AbortError");
      for await (const chunk of this.api.chat(answer.request, signal)) {
        this.view.add(answer, answer.add(chunk, Math.round(performance.now() - began)));
        this.live.update();
        this.chat.saveSoon();
      }
      answer.state = "done";
    } catch (error) {
      if (error.name === "AbortError") answer.state = "stopped";
      else this._fail(answer, error);
    }
    this.view.changed(turn, answer);
    this.live.update();
  }

  _fail(answer, error) {
    if (!(error instanceof ApiError)) console.error(error);
    answer.state = "error";
    const { status = 500, message, retryAfter = null } = error;
    answer.error = { status, message, retryAfter };
    if (status === 0 || status === 503) this.page.checkHealth();
  }

  stop() {
    this.running?.abort();
    this.running = null;
    this.page.setBusy(false);
  }
}

const playground = new Playground();
byId("prompt").value = prompt.get();
playground.page.start();

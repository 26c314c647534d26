// The form of parameters, system prompt, output format and tools, and the request that comes of it.

import { byId } from "./dom.js";
import { apiKey, storedSettings } from "./store.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const PLAIN = [...NUMBERS, "k", "system", "format", "tools", "tool_choice", "thinking", "reasoning_effort", "order"];
const MOST_DRAFTS = 16; // until the server says how many it takes
const CHECKS = ["show-runs", "show-numbers", "compare"];
const DEFAULTS = { temperature: "0", max_tokens: "512", k: "", "show-runs": true };

const CONSTRAINTS = {
  json_schema: JSON.stringify(
    {
      type: "object",
      properties: { name: { type: "string" }, count: { type: "integer" } },
      required: ["name", "count"],
      additionalProperties: false,
    },
    null,
    2,
  ),
  regex: "[A-Z][a-z]+ \\d{1,3}",
  choice: "yes\nno",
  grammar: 'start: "(" NUMBER ("," NUMBER)* ")"\nNUMBER: /[0-9]+/',
};

const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city, now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
      },
    },
  },
];

/** A field that cannot be read as it is. */
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export class Settings {
  /** `onView` runs when what is shown changes: colours of steps and their numbers. */
  constructor(onView) {
    this.onView = onView;
    this.maxDrafts = null;
    this.constraints = {};
    this._load(storedSettings.get());
    byId("settings").addEventListener("input", (event) => this._changed(event.target));
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    for (const id of CHECKS) byId(id).addEventListener("change", (event) => this._changed(event.target));
    byId("tools-example").addEventListener("click", () => this._insertTools());
    byId("reset").addEventListener("click", () => this._reset());
    byId("api-key").value = apiKey.get();
    byId("api-key").addEventListener("input", () => apiKey.set(byId("api-key").value.trim()));
    byId("host").textContent = location.host;
  }

  get system() {
    return byId("system").value.trim();
  }

  get together() {
    return byId("order").value === "together";
  }

  get compares() {
    return byId("compare").checked && this.maxDrafts !== 0;
  }

  /** What the page shows of answers. */
  get view() {
    return { runs: byId("show-runs").checked, numbers: byId("show-numbers").checked };
  }

  get samples() {
    return byId("temperature").value === "" || Number(byId("temperature").value) > 0;
  }

  /** The largest k that the server takes, where it says so; of one that takes none nothing of drafts is asked. */
  setMaxDrafts(k) {
    for (const node of document.querySelectorAll(".of-drafts")) node.hidden = k === 0;
    const isServers = this._k() === null;
    this.maxDrafts = k;
    byId("k").max = k ?? MOST_DRAFTS;
    if (isServers) byId("k").value = byId("k").max;
    this._show();
  }

  /** What the request says of drafts; null at the far right, where it says nothing. */
  _k() {
    const { value, max } = byId("k");
    return value === max ? null : Number(value);
  }

  /** The body of a chat completion. Raises FieldError. */
  body(model, messages) {
    const body = {
      model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
      return_steps: true,
    };
    for (const name of NUMBERS) {
      const input = byId(name);
      if (!input.validity.valid) throw new FieldError(name, input.validationMessage);
      if (input.value !== "") body[name] = Number(input.value);
    }
    const k = this._k();
    if (k !== null) body.num_speculative_tokens = k;
    Object.assign(body, this._format(), this._tools());
    if (byId("thinking").value) body.chat_template_kwargs = { enable_thinking: byId("thinking").value === "on" };
    if (byId("reasoning_effort").value) body.reasoning_effort = byId("reasoning_effort").value;
    return body;
  }

  _format() {
    const format = byId("format").value;
    const text = byId("constraint").value;
    if (!format) return {};
    if (format === "json_object") return { response_format: { type: "json_object" } };
    if (format === "json_schema") {
      const schema = parse("constraint", text, "The schema");
      return { response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } } };
    }
    if (!text.trim()) throw new FieldError("constraint", "Write what the answer must match.");
    if (format === "choice") return { structured_outputs: { choice: text.split("\n").filter((line) => line !== "") } };
    return { structured_outputs: { [format]: text } };
  }

  _tools() {
    const text = byId("tools").value.trim();
    if (!text) return {};
    const tools = parse("tools", text, "The list of tools");
    if (!Array.isArray(tools)) throw new FieldError("tools", "The tools are a JSON list: [ … ].");
    if (!tools.length) return {};
    const wrapped = tools.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
    const choice = byId("tool_choice").value;
    return { tools: wrapped, ...(choice && { tool_choice: choice }) };
  }

  /** Shows an error beside its field, opens what hides it, and goes there. */
  showError({ field, message }) {
    const input = byId(field);
    const text = byId(`${field}-error`);
    if (text) text.textContent = message;
    for (let at = input.closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
    input.focus();
    if (!text) input.reportValidity();
  }

  _changed(target) {
    if (target.id === "api-key") return this._show();
    if (target.id === "format") byId("constraint").value = this.constraints[target.value] ?? CONSTRAINTS[target.value] ?? "";
    if (target.id === "constraint") this.constraints[byId("format").value] = target.value;
    this._save();
    this._show();
    this._check();
    if (CHECKS.includes(target.id)) this.onView();
  }

  _check() {
    for (const [field, read] of [["constraint", () => this._format()], ["tools", () => this._tools()]]) {
      let message = "";
      try {
        read();
      } catch (error) {
        message = error.message;
      }
      byId(`${field}-error`).textContent = message;
      byId(field).setAttribute("aria-invalid", message ? "true" : "false");
    }
  }

  _show() {
    const k = this._k();
    byId("k-text").textContent = k === null ? "server's" : k === 0 ? "off" : k;
    const format = byId("format");
    byId("constraint").hidden = !CONSTRAINTS[format.value];
    byId("format-tag").textContent = format.value ? format.selectedOptions[0].textContent : "";
    byId("tools-tag").textContent = byId("tools").value.trim() ? "on" : "";
    byId("key-tag").textContent = byId("api-key").value ? "key set" : "";
  }

  _insertTools() {
    byId("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
    this._changed(byId("tools"));
  }

  _reset() {
    const theme = storedSettings.get().theme;
    storedSettings.set({ theme });
    this.constraints = {};
    this._load({});
    this._check();
    this.onView();
  }

  _load(stored) {
    const values = { ...DEFAULTS, ...stored };
    this.constraints = stored.constraints ?? {};
    for (const id of PLAIN) byId(id).value = values[id] ?? "";
    if (!(Number(values.k || -1) >= 0)) byId("k").value = byId("k").max;
    for (const id of CHECKS) byId(id).checked = values[id] ?? false;
    const format = byId("format").value;
    byId("constraint").value = this.constraints[format] ?? CONSTRAINTS[format] ?? "";
    this._show();
  }

  _save() {
    const values = { ...storedSettings.get(), constraints: this.constraints };
    for (const id of PLAIN) values[id] = byId(id).value;
    // The far right is another number with another server.
    values.k = String(this._k() ?? "");
    for (const id of CHECKS) values[id] = byId(id).checked;
    storedSettings.set(values);
  }
}

function parse(field, text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(field, `${what} is not valid JSON: ${error.message}`);
  }
}

// The present request as curl, as Python and as JSON.

import { byId, copy } from "./dom.js";

function curl(body, url) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -sN ${url}/v1/chat/completions \\\n  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n  -H "Content-Type: application/json" \\\n  -d '${json}'`;
}

/** JSON as a Python literal. */
function literal(value, indent = "") {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((item) => `${inner}${literal(item, inner)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const items = Object.entries(value).map(([name, item]) => `${inner}${JSON.stringify(name)}: ${literal(item, inner)},\n`);
    return items.length ? `{\n${items.join("")}${indent}}` : "{}";
  }
  return JSON.stringify(value);
}

// What the client's `create` takes by name; all else goes into `extra_body`.
const OPENAI = new Set(
  "model messages stream stream_options temperature top_p max_tokens seed tools tool_choice response_format reasoning_effort".split(" "),
);

function python(body, url) {
  const named = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  if (Object.keys(extra).length) named.push(["extra_body", extra]);
  const args = named.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("");
  return `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))\nstream = client.chat.completions.create(\n${args})\nfor chunk in stream:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)\n`;
}

export class CodeDialog {
  /** `getBody` returns the body of the request that would be sent now. */
  constructor(getBody) {
    this.getBody = getBody;
    this.dialog = byId("code");
    byId("show-code").addEventListener("click", () => this.open());
    for (const radio of this.dialog.querySelectorAll("input[name=language]")) radio.addEventListener("change", () => this._draw());
    byId("code-copy").addEventListener("click", (event) => copy(byId("code-text").textContent, event.currentTarget));
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
  }

  open() {
    const body = this.getBody();
    if (!body) return;
    this.body = body;
    this._draw();
    this.dialog.showModal();
  }

  _draw() {
    const language = this.dialog.querySelector("input[name=language]:checked").value;
    const url = new URL(".", location.href).href.replace(/\/$/, "");
    const write = { curl: () => curl(this.body, url), python: () => python(this.body, url), json: () => JSON.stringify(this.body, null, 2) };
    byId("code-text").textContent = write[language]();
  }
}

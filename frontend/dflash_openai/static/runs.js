// Text whose parts are coloured by the step of the engine that they came from.

import { element, shade, milliseconds } from "./dom.js";

/**
 * Appends text to an element, a line a block: the browser then lays out the last line again, not all of the answer.
 * Newlines stay in the text, so that its text content is exactly the answer.
 */
export class RunText {
  constructor(parent) {
    this.parent = parent;
    this.line = null;
    this.run = null;
    this.index = -1;
  }

  add({ text, index, step }) {
    let start = 0;
    while (start < text.length) {
      const newline = text.indexOf("\n", start);
      const end = newline < 0 ? text.length : newline + 1;
      this._append(text.slice(start, end), index, step);
      if (newline >= 0) this.line = null;
      start = end;
    }
  }

  _append(text, index, step) {
    if (this.line === null) {
      this.line = element("div", { class: "line" });
      this.parent.append(this.line);
      this.run = null;
    }
    if (this.run === null || this.index !== index) {
      const isFirst = this.index !== index;
      this.index = index;
      this.run = element("span", { class: `run s${shade(step[0])}`, "data-step": index });
      if (isFirst && step[0]) this.run.dataset.n = step[0];
      this.line.append(this.run);
    }
    this.run.append(text);
  }
}

/** What a step did, in words. */
export function describeStep(answer, index) {
  const [tokens, drafts, at] = answer.steps[index];
  const before = index ? answer.steps[index - 1][2] : 0;
  const what = tokens === 1 ? "1 token" : `${tokens ?? "?"} tokens`;
  let how = "";
  if (drafts) how = `${tokens - 1} of ${drafts} drafts accepted and the model's own token`;
  else if (drafts === 0) how = index ? "no drafts" : "from the prompt";
  else if (index === 0) how = "from the prompt";
  else if (tokens > 1) how = `${tokens - 1} accepted drafts and the model's own token`;
  return `Step ${index + 1}: ${what}${how ? ` (${how})` : ""}, +${milliseconds(at - before)}`;
}

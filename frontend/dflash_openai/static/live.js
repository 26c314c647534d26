// The live figures: acceptance length, speed, and what each step yielded.

import { figures } from "./answer.js";
import { byId, element, milliseconds, number, shade } from "./dom.js";

const BAR = 5; // pixels of a step in the chart, its gap included
const STATES = {
  waiting: "waiting",
  streaming: "streaming",
  done: "",
  stopped: "stopped",
  interrupted: "interrupted",
  error: "error",
};

/** One line under an answer. */
export function summary(answer) {
  const { numTokens, numSteps, acceptanceLength, tokensPerSecond, ttft } = figures(answer);
  if (!numSteps) return "";
  const parts = [`${numTokens} tokens in ${numSteps} ${numSteps === 1 ? "step" : "steps"}`];
  if (acceptanceLength !== null) parts.push(`acceptance length ${number(acceptanceLength)}`);
  if (tokensPerSecond !== null) parts.push(`${number(tokensPerSecond)} tokens/s`);
  parts.push(`first token ${milliseconds(ttft)}`);
  return parts.join(" · ");
}

export class LivePanel {
  constructor() {
    this.answer = null;
    this.maxDrafts = null;
    this.maxModelLen = null;
    this._frame = null;
    new ResizeObserver(() => this.update()).observe(byId("step-chart"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.update());
    addEventListener("themechange", () => this.update());
  }

  show(answer) {
    this.answer = answer;
    this.update();
  }

  update() {
    this._frame ??= requestAnimationFrame(() => {
      this._frame = null;
      this._draw();
    });
  }

  _draw() {
    const answer = this.answer;
    const values = answer ? figures(answer) : {};
    const set = (id, text) => {
      if (byId(id).textContent !== text) byId(id).textContent = text;
    };
    set("live-state", answer ? STATES[answer.state] : "");
    byId("live-state").dataset.state = answer?.state ?? "";
    set("f-acceptance", number(values.acceptanceLength));
    set("f-speed", number(values.tokensPerSecond, 1));
    set("f-ttft", milliseconds(values.ttft));
    set("f-drafts", answer && !answer.speculative ? "off" : number(values.draftsPerStep, 1));
    set("f-budget", answer?.isOpen && values.lastDrafts !== null && values.numSteps > 1 ? `now ${values.lastDrafts}` : "");
    set("f-rate", values.acceptanceRate == null ? "–" : `${Math.round(values.acceptanceRate * 100)}%`);
    set("f-steps", values.numSteps ? `${values.numTokens} / ${values.numSteps}` : "–");
    this._drawStrip(answer, values);
    this._drawSteps(answer?.steps ?? []);
    this._drawHistogram(values.histogram ?? []);
    this._drawContext(answer?.usage);
  }

  /** The figures in a line above the prompt, where there is no space for the panel. */
  _drawStrip(answer, { acceptanceLength, tokensPerSecond, ttft, numTokens, numSteps }) {
    const parts = numSteps
      ? [
          ["acceptance", number(acceptanceLength)],
          ["tok/s", number(tokensPerSecond, 0)],
          ["first", milliseconds(ttft)],
          ["steps", `${numTokens}/${numSteps}`],
        ]
      : [];
    byId("strip").replaceChildren(...parts.map(([name, text]) => element("span", {}, element("b", {}, text), ` ${name}`)));
  }

  /** A bar for each step: filled to its tokens, outlined to what its drafts could have given. */
  _drawSteps(steps) {
    const canvas = byId("step-chart");
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const shown = steps.slice(-Math.floor(width / BAR));
    const highest = shown.reduce((most, [tokens, drafts]) => Math.max(most, tokens ?? 0, (drafts ?? 0) + 1), 4);
    const style = getComputedStyle(canvas);
    const colours = Array.from({ length: 9 }, (_, index) => style.getPropertyValue(`--bar-${index}`));
    const outline = style.getPropertyValue("--bar-draft");
    shown.forEach(([tokens, drafts], index) => {
      const x = width - (shown.length - index) * BAR;
      const bar = (count) => (count / highest) * (height - 2);
      if (drafts) {
        context.fillStyle = outline;
        context.fillRect(x, height - bar(drafts + 1), BAR - 1, bar(drafts + 1));
      }
      context.fillStyle = colours[shade(tokens)];
      context.fillRect(x, height - bar(tokens ?? 0), BAR - 1, bar(tokens ?? 0));
    });
    const mean = shown.reduce((sum, [tokens]) => sum + (tokens ?? 0), 0) / (shown.length || 1);
    canvas.setAttribute("aria-label", `Tokens of the last ${shown.length} steps: ${number(mean, 1)} on average`);
  }

  _drawHistogram(histogram) {
    const length = Math.max(histogram.length, Math.min((this.maxDrafts ?? 7) + 2, 18));
    const most = Math.max(1, ...histogram.filter((count) => count));
    const node = byId("histogram");
    while (node.childElementCount > length - 1) node.lastChild.remove();
    while (node.childElementCount < length - 1) {
      node.append(element("div", {}, element("i"), element("span", {}, String(node.childElementCount + 1))));
    }
    [...node.children].forEach((column, index) => {
      const count = histogram[index + 1] ?? 0;
      column.firstChild.className = `s${shade(index + 1)}`;
      column.firstChild.style.height = `${(count / most) * 100}%`;
      column.title = `${count} steps of ${index + 1} tokens`;
    });
    const words = histogram.flatMap((count, index) => (count ? [`${count} of ${index}`] : []));
    node.setAttribute("aria-label", `Steps by number of tokens: ${words.join(", ") || "none yet"}`);
  }

  _drawContext(usage) {
    byId("context").hidden = !usage || !this.maxModelLen;
    if (byId("context").hidden) return;
    const used = usage.prompt_tokens + usage.completion_tokens;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    byId("context-text").textContent =
      `Context: ${used.toLocaleString("en")} of ${this.maxModelLen.toLocaleString("en")} tokens` +
      (cached ? `, ${cached.toLocaleString("en")} from the prefix cache` : "");
    byId("context-meter").value = used / this.maxModelLen;
  }
}

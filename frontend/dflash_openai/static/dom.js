// Elements from code. Text is always set as text: nothing that a model or a server sends is read as HTML.

export const byId = (id) => document.getElementById(id);

/** `element("p", { class: "help", onclick: f }, "text", child)`; a property that is null or false is left out. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

export function button(label, iconName, onclick, properties = {}) {
  return element("button", { type: "button", class: "small", onclick, ...properties }, iconName && icon(iconName), label);
}

/** Says `text` to screen readers, once. */
export function announce(text) {
  const region = byId("announce");
  region.textContent = "";
  requestAnimationFrame(() => (region.textContent = text));
}

/** Copies, and says so on the button for a moment. */
export async function copy(text, node) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without a secure context there is no clipboard: the older way.
    const area = element("textarea", { class: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    node.focus();
  }
  node.classList.add("copied");
  announce("Copied");
  setTimeout(() => node.classList.remove("copied"), 1200);
}

/** A figure as a person reads it: three digits where they mean something. */
export function number(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(value >= 10 ? Math.min(1, digits) : digits);
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${Math.round(value)} ms`;
}

const NUM_SHADES = 8;
let longestDraft = NUM_SHADES;

/** Spreads the shades over steps of up to `k` drafts. */
export function setLongestDraft(k) {
  longestDraft = Math.max(k ?? 0, NUM_SHADES);
}

/** The shade of a step, from 0 (one token) to 8. */
export function shade(numTokens) {
  const accepted = Math.max(0, (numTokens ?? 1) - 1);
  return accepted && Math.max(1, Math.min(NUM_SHADES, Math.round((accepted * NUM_SHADES) / longestDraft)));
}

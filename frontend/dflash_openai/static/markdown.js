// Markdown as elements: fenced code, headings, lists, paragraphs, and bold, italic and code in a line.
// Everything else stays text; links are not made, since a model chose where they lead.

import { button, copy, element } from "./dom.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|(?<![\w*])\*(?!\s)(.+?)(?<!\s)\*(?![\w*])/g;

/** The elements of a text. */
export function render(text) {
  const lines = text.split("\n");
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const block = [readFence, readHeading, readList, readParagraph].map((read) => read(lines, at)).find((found) => found);
    if (block) nodes.push(block.node);
    at = block ? block.end : at + 1;
  }
  return nodes;
}

function readFence(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]) ?? [];
  if (!fence) return null;
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(fence) && lines[end].trim().replaceAll(fence[0], "") === "")) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  const head = element("div", { class: "code-head" }, language || "code", button("Copy", "copy", (event) => copy(code, event.currentTarget)));
  return { node: element("div", { class: "code-block" }, head, element("pre", { tabindex: "0" }, element("code", {}, code))), end: end + 1 };
}

function readHeading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]) ?? [];
  if (!marks) return null;
  // Below the page's own headings, whatever level the model wrote.
  return { node: element("p", { class: `heading h${marks.length}`, role: "heading", "aria-level": String(Math.min(6, marks.length + 2)) }, ...inline(text)), end: at + 1 };
}

function readList(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const isOrdered = /\d/.test(first[2]);
  const list = element(isOrdered ? "ol" : "ul", { start: isOrdered ? String(Number.parseInt(first[2], 10)) : null });
  let end = at;
  for (; end < lines.length; end += 1) {
    const [, indent, , text] = ITEM.exec(lines[end]) ?? [];
    if (text === undefined) break;
    list.append(element("li", { class: `indent${Math.min(4, Math.floor(indent.length / 2))}` }, ...inline(text)));
  }
  return { node: list, end };
}

function readParagraph(lines, at) {
  if (!lines[at].trim()) return null;
  let end = at + 1;
  const ends = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || ITEM.test(line);
  while (end < lines.length && !ends(lines[end])) end += 1;
  return { node: element("p", {}, ...inline(lines.slice(at, end).join("\n"))), end };
}

/** Text and elements of a line. */
function inline(text) {
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, ticks, code, bold, italic] = found;
    nodes.push(text.slice(at, found.index));
    if (ticks) nodes.push(element("code", {}, code));
    else if (bold !== undefined) nodes.push(element("strong", {}, ...inline(bold)));
    else nodes.push(element("em", {}, ...inline(italic)));
    at = found.index + whole.length;
  }
  nodes.push(text.slice(at));
  return nodes.filter((node) => node !== "");
}

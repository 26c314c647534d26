// One answer as it streams: its text, its tool calls, and the step of the engine that each part came from.

/**
 * A step is [tokens, draft tokens or null, milliseconds since the request, characters of reasoning, of content].
 * A chunk's `steps` are those of the engine since the last chunk: [tokens that the step accepted, drafts that it
 * verified, characters of its text]; of a server that does not tell them, a chunk is a step. Plain arrays, since an answer of 10,000 tokens is stored as it streams.
 */
export class Answer {
  constructor(fields = {}) {
    Object.assign(this, {
      speculative: true, // false: asked for with num_speculative_tokens 0
      content: "",
      reasoning: "",
      toolCalls: [],
      tokenIds: null, // a list where they are kept: in a comparison
      steps: [],
      state: "waiting", // then streaming, and at last done, stopped, interrupted or error
      finishReason: null,
      error: null,
      usage: null,
      server: null, // the server's own counts: metrics.speculative_decoding
      elapsed: 0,
      request: null,
      ...fields,
    });
  }

  get isOpen() {
    return this.state === "waiting" || this.state === "streaming";
  }

  /** Adds a chunk that came `elapsed` milliseconds after the request. Returns the new pieces of text. */
  add(chunk, elapsed) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.metrics?.speculative_decoding) this.server = chunk.metrics.speculative_decoding;
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    const delta = choice.delta ?? {};
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
    const content = delta.content ?? "";
    this._addToolCalls(delta.tool_calls ?? []);
    if (choice.token_ids) this.tokenIds?.push(...choice.token_ids);
    const steps = choice.steps ?? this._oneStep(choice, reasoning || content || delta.tool_calls?.length);
    if (!steps.length && !reasoning && !content) return [];
    this.state = "streaming";
    this.elapsed = elapsed;
    const first = this.steps.length;
    for (const [numTokens, numDrafts] of steps) this.steps.push([numTokens, numDrafts, elapsed, 0, 0]);
    if (!this.steps.length) this.steps.push([null, null, elapsed, 0, 0]);
    this.reasoning += reasoning;
    this.content += content;
    return this._distribute(reasoning, content, Math.min(first, this.steps.length - 1), steps);
  }

  /** The step of a chunk of a server that does not tell its steps: a chunk is one. */
  _oneStep(choice, hasOutput) {
    const numTokens = choice.token_ids?.length ?? (hasOutput ? null : 0);
    return numTokens === 0 ? [] : [[numTokens, null]];
  }

  /** Pieces of a chunk's text, each with its step. What no step accounts for belongs to the last one. */
  _distribute(reasoning, content, first, steps) {
    const pieces = [];
    const rest = { reasoning, content };
    const last = this.steps.length - 1;
    for (let index = first; index <= last; index += 1) {
      let length = index < last ? codeUnits(rest.reasoning + rest.content, steps[index - first]?.[2] ?? Infinity) : Infinity;
      for (const [kind, field] of [["reasoning", 3], ["content", 4]]) {
        const text = rest[kind].slice(0, length);
        if (!text) continue;
        rest[kind] = rest[kind].slice(text.length);
        length -= text.length;
        this.steps[index][field] += text.length;
        pieces.push({ kind, text, index, step: this.steps[index] });
      }
    }
    return pieces;
  }

  _addToolCalls(deltas) {
    for (const delta of deltas) {
      const call = (this.toolCalls[delta.index ?? 0] ??= { id: "", name: "", arguments: "" });
      if (delta.id) call.id = delta.id;
      call.name += delta.function?.name ?? "";
      call.arguments += delta.function?.arguments ?? "";
    }
  }

  /** The pieces of text that `add` has returned so far, for an answer that is drawn anew. */
  pieces() {
    const pieces = [];
    let reasoning = 0;
    let content = 0;
    this.steps.forEach((step, index) => {
      const [, , , numReasoning, numContent] = step;
      if (numReasoning) {
        pieces.push({ kind: "reasoning", text: this.reasoning.slice(reasoning, (reasoning += numReasoning)), index, step });
      }
      if (numContent) {
        pieces.push({ kind: "content", text: this.content.slice(content, (content += numContent)), index, step });
      }
    });
    return pieces;
  }

  /** The assistant message that goes into the next request. */
  message() {
    const message = { role: "assistant", content: this.content || null };
    if (this.reasoning) message.reasoning = this.reasoning;
    if (this.toolCalls.length) {
      message.tool_calls = this.toolCalls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    return message;
  }
}

/** How many code units the first `numChars` characters of a text have: the server counts characters. */
function codeUnits(text, numChars) {
  let units = 0;
  for (const character of text) {
    if (numChars-- <= 0) break;
    units += character.length;
  }
  return units;
}

/**
 * Figures of an answer, null where they are not known.
 *
 * numTokens, numSteps; acceptanceLength: mean tokens of the steps that verified drafts (of all steps after the first
 * where the server does not tell which did); draftsPerStep: mean drafts of those; acceptanceRate: accepted drafts of
 * all; ttft: ms to the first token; tokensPerSecond: from the first token on; histogram[i]: steps of i tokens.
 */
export function figures(answer) {
  const { steps } = answer;
  const histogram = [];
  let numTokens = 0;
  let numDrafted = 0;
  let draftedTokens = 0;
  let numDrafts = 0;
  let laterTokens = 0;
  let knowsDrafts = false;
  steps.forEach(([tokens, drafts], index) => {
    numTokens += tokens ?? 0;
    histogram[tokens ?? 0] = (histogram[tokens ?? 0] ?? 0) + 1;
    if (index) laterTokens += tokens ?? 0;
    if (drafts !== null) knowsDrafts = true;
    if (drafts) {
      numDrafted += 1;
      draftedTokens += tokens;
      numDrafts += drafts;
    }
  });
  const numLater = steps.length - 1;
  const seconds = steps.length ? (steps.at(-1)[2] - steps[0][2]) / 1000 : 0;
  const server = answer.server;
  let acceptanceLength = null;
  if (knowsDrafts) acceptanceLength = numDrafted ? draftedTokens / numDrafted : null;
  else if (answer.speculative && numLater > 0) acceptanceLength = laterTokens / numLater;
  let draftsPerStep = null;
  if (numDrafted) draftsPerStep = numDrafts / numDrafted;
  else if (server?.num_spec_steps) draftsPerStep = server.num_draft_tokens / server.num_spec_steps;
  return {
    numTokens: numTokens || answer.usage?.completion_tokens || 0,
    numSteps: steps.length,
    acceptanceLength,
    draftsPerStep,
    acceptanceRate: numDrafts ? (draftedTokens - numDrafted) / numDrafts : null,
    lastDrafts: steps.at(-1)?.[1] ?? null,
    ttft: steps.length ? steps[0][2] : null,
    tokensPerSecond: seconds > 0.005 ? laterTokens / seconds : null,
    histogram,
  };
}

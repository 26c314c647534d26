// One answer as it streams: its text, its tool calls, and the step of the engine that each part came from.

/**
 * A step is [tokens, draft tokens or null, milliseconds since the request, characters of reasoning, of content].
 * The server sends one chunk for each step of the engine: a chunk's `token_ids` are the tokens that step accepted,
 * `num_draft_tokens` the drafts it verified. Plain arrays, since an answer of 10,000 tokens is stored as it streams.
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
    const numTokens = choice.token_ids?.length ?? (content || reasoning || delta.tool_calls?.length ? null : 0);
    if (numTokens === 0 && !content && !reasoning) return [];
    this.state = "streaming";
    this.elapsed = elapsed;
    let step = this.steps.at(-1);
    if (numTokens !== 0 || !step) {
      step = [numTokens, choice.num_draft_tokens ?? null, elapsed, 0, 0];
      this.steps.push(step);
    }
    step[3] += reasoning.length;
    step[4] += content.length;
    this.reasoning += reasoning;
    this.content += content;
    const index = this.steps.length - 1;
    const pieces = [];
    if (reasoning) pieces.push({ kind: "reasoning", text: reasoning, index, step });
    if (content) pieces.push({ kind: "content", text: content, index, step });
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
  else if (server?.num_spec_steps) draftsPerStep = server.num_spec_tokens / server.num_spec_steps;
  return {
    numTokens: numTokens || answer.usage?.completion_tokens || 0,
    numSteps: steps.length,
    acceptanceLength,
    draftsPerStep,
    acceptanceRate: numDrafts ? (draftedTokens - numDrafted) / numDrafts : null,
    lastDrafts: steps.at(-1)?.[1] ?? null,
    ttft: steps.length ? steps[0][2] : null,
    tokensPerSecond: seconds > 0.02 ? laterTokens / seconds : null,
    histogram,
  };
}

// What a step does around the models: which tokens lie where, what is accepted, what the drafter runs. As the references of
// `prepare_step.py`, `accept.py` and `prepare_draft.py` say.

#pragma once
#include <algorithm>
#include <cstdint>

// The state of requests, an entry of each tensor for a request.
struct State {
  int64_t* tokens; int32_t *blocks, *num_blocks, *computed;
  int64_t max_len, max_blocks, block_size;
  int64_t covered(int64_t request) const { return request < 0 ? 0 : std::min(num_blocks[request] * block_size, max_len); }
};
// Ids, positions and slots of tokens.
struct Tokens {
  int64_t *ids, *positions, *slots;
  void set(int64_t i, const State& s, int64_t request, int64_t position) const {
    int64_t block = position / s.block_size;
    ids[i] = s.tokens[request * s.max_len + position];
    positions[i] = position;
    slots[i] = int64_t(s.blocks[request * s.max_blocks + block]) * s.block_size + position - block * s.block_size;
  }
  void clear(int64_t i) const { ids[i] = positions[i] = 0, slots[i] = -1; }
};

// What a step knows of a row.
struct Row { int64_t request, start, unverified, num_new, num_draft, num_next_draft, samples; };
// The layout of a step, each of R rows and T tokens behind the other. narrow: `DeviceBatch` but for the rows of tokens, starts,
// the positions behind the last tokens; of tokens their rows; of logits tokens and rows, for which there is room for T; block
// tables. wide: whether a slot is below 0, then ids, positions, slots; of rows their tokens and the positions behind the last.
// Returns how many rows of logits there are: one that belongs to no row where no row samples.
static int64_t lay_out(const State& s, const Row* rows, int64_t count, int64_t tokens, int64_t table_width, int32_t* narrow, int64_t* wide) {
  int32_t *starts = narrow + 9 * count, *seq_lens = starts + count, *token_row = seq_lens + count, *logits_token = token_row + tokens;
  int32_t *logits_row = logits_token + tokens, *tables = logits_row + tokens;
  int64_t *lens = wide + 1 + 3 * tokens, *ends = lens + count, token = 0, logits = 0;
  Tokens out{wide + 1, wide + 1 + tokens, wide + 1 + 2 * tokens};
  wide[0] = 0;
  for (int64_t r = 0; r < count; r++) {
    const Row& row = rows[r];
    int64_t length = row.num_new + row.num_draft, covered = s.covered(row.request);
    int64_t start = row.unverified > 0 ? s.computed[row.request] : row.start;
    int64_t numbers[] = {row.request, row.start, row.unverified, row.num_new, row.num_draft, row.num_next_draft, token, length, row.samples ? logits : -1};
    for (int i = 0; i < 9; i++) narrow[i * count + r] = int32_t(numbers[i]);
    starts[r] = int32_t(start);
    lens[r] = length;
    seq_lens[r] = int32_t(ends[r] = std::min(start + length, covered));
    for (int64_t i = 0; row.samples && i <= row.num_draft; i++, logits++) logits_token[logits] = int32_t(token + row.num_new - 1 + i), logits_row[logits] = int32_t(r);
    for (int64_t i = 0; i < length; i++, token++) {
      token_row[token] = int32_t(r);
      if (start + i < covered) out.set(token, s, row.request, start + i); else out.clear(token), wide[0] = 1;
    }
    std::copy_n(s.blocks + row.request * s.max_blocks, table_width, tables + r * table_width);
  }
  if (logits) return logits;
  logits_token[0] = 0, logits_row[0] = -1;
  return 1;
}
// layout: `narrow` of `lay_out`. results: `[rows][k + 3]`: accepted drafts, verified ones, new tokens.
static void accept_drafts(const State& s, const int64_t* own, int64_t k, const int32_t* layout, int64_t rows, int64_t* results) {
  const int32_t *requests = layout, *num_new = layout + 3 * rows, *num_draft = num_new + rows, *logits_start = layout + 8 * rows, *starts = logits_start + rows;
  std::fill_n(results, rows * (k + 3), 0);
  for (int64_t r = 0; r < rows; r++) {
    int64_t request = requests[r], first = int64_t(starts[r]) + num_new[r], count = 0;
    bool samples = logits_start[r] >= 0;
    const int64_t* mine = own + (samples ? logits_start[r] : 0);
    int64_t* row = s.tokens + std::max<int64_t>(request, 0) * s.max_len;
    if (samples) {
      while (count < num_draft[r] && (first + count < s.max_len ? row[first + count] : 0) == mine[count]) count++;
      std::copy_n(mine, count + 1, results + r * (k + 3) + 2);
    }
    results[r * (k + 3)] = count;
    results[r * (k + 3) + 1] = num_draft[r];
    if (request < 0) continue;
    if (samples && first + count < s.max_len) row[first + count] = mine[count];
    s.computed[request] = int32_t(first + count);
  }
}
// The features that wait until they are needed, of each request: how many tokens, consecutive ones, where the first lies, and the
// features of `room` tokens, of so many bytes each.
struct Waiting { int64_t *counts, *positions, *slots; char* features; int64_t room, bytes; };
// Tokens of a context, one behind the other.
struct Context { char* features; int64_t *positions, *slots; int32_t* rows; };
// After `accept_drafts`: the tokens of a step whose positions are final go to `out`, but those that wait: in a row that has one known
// token and proposes nothing, where rows may wait, those whose block is not full. What has waited goes there once its block is full or
// its row goes on otherwise. Returns how many went there; -1, and does nothing, where these are all tokens of the step as they are; and
// -2 less their number, and does nothing, where they are more than `room`.
static int64_t take_context(const int32_t* computed, int64_t block_size, const Waiting& w, const int32_t* layout, int64_t rows, bool may_wait,
                            const int64_t* positions, const int64_t* slots, const char* features, const Context& out, int64_t room) {
  const int32_t *requests = layout, *num_new = layout + 3 * rows, *num_next = layout + 5 * rows, *first = layout + 6 * rows, *lens = first + rows;
  auto rests = [&](int64_t r) { return may_wait && num_next[r] == 0 && num_new[r] == 1; };
  auto tail = [&](int64_t r) { return computed[requests[r]] / block_size * block_size; };  // where the block begins that is not full
  auto is_final = [&](int64_t r, int64_t t) { return positions[t] < computed[requests[r]] && slots[t] >= 0; };
  bool as_they_are = true;
  for (int64_t r = 0; r < rows && as_they_are; r++) {
    as_they_are = w.counts[requests[r]] == 0;
    for (int64_t t = first[r]; t < first[r] + lens[r] && as_they_are; t++) as_they_are = is_final(r, t) && !(rests(r) && positions[t] >= tail(r));
  }
  if (as_they_are) return -1;
  auto leaves = [&](int64_t r) { int64_t q = requests[r]; return w.counts[q] && (w.positions[q] < tail(r) || !rests(r)); };  // what waits
  int64_t needed = 0, count = 0;
  for (int64_t r = 0; r < rows; r++) {
    if (leaves(r)) needed += w.counts[requests[r]];
    for (int64_t t = first[r]; t < first[r] + lens[r]; t++) needed += is_final(r, t) && (!rests(r) || positions[t] < tail(r));
  }
  if (needed > room) return -2 - needed;
  auto put = [&](const char* from, int64_t position, int64_t slot, int64_t r) {
    std::copy_n(from, w.bytes, out.features + count * w.bytes);
    out.positions[count] = position, out.slots[count] = slot, out.rows[count++] = int32_t(r);
  };
  for (int64_t r = 0; r < rows; r++) {
    int64_t request = requests[r], &waiting = w.counts[request];
    char* kept = w.features + request * w.room * w.bytes;
    if (leaves(r)) {
      for (int64_t i = 0; i < waiting; i++) put(kept + i * w.bytes, w.positions[request] + i, w.slots[request] + i, r);
      waiting = 0;
    }
    for (int64_t t = first[r]; t < first[r] + lens[r]; t++) {
      if (!is_final(r, t)) continue;
      const char* from = features + t * w.bytes;
      if (!rests(r) || positions[t] < tail(r)) { put(from, positions[t], slots[t], r); continue; }
      if (!waiting) w.positions[request] = positions[t], w.slots[request] = slots[t];
      std::copy_n(from, w.bytes, kept + waiting++ * w.bytes);
    }
  }
  return count;
}
// Queries of the rows that draft, `[rows][width]`.
static void prepare_drafts(const State& s, const int32_t* requests, const int32_t* num_next, int64_t rows, int64_t width, int64_t placeholder,
                           int64_t lookahead_base, const Tokens& out, int32_t* query_lens, int32_t* seq_lens) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t request = requests[r], drafts = request >= 0 && num_next[r] > 0, anchor = drafts ? s.computed[request] : 0, covered = s.covered(request);
    query_lens[r] = drafts ? int32_t(num_next[r] + lookahead_base) : 0;
    seq_lens[r] = int32_t(std::min<int64_t>(anchor + query_lens[r], covered));
    for (int64_t i = 0; i < width; i++) {
      int64_t at = r * width + i;
      if (i >= query_lens[r] || anchor + i >= covered) { out.clear(at); continue; }
      out.set(at, s, request, anchor + i);
      if (i > 0) out.ids[at] = placeholder;
    }
  }
}
// drafts, confidence: `[rows][width]`, or one behind the other where width is 0. sure: `[requests][k]`, or null.
static void store_drafts(const State& s, const int32_t* requests, const int32_t* num_next, int64_t rows, const int64_t* drafts,
                         const float* confidence, int64_t width, float* sure, int64_t k) {
  int64_t at = 0;
  for (int64_t r = 0; r < rows; r++) {
    int64_t request = requests[r];
    if (request < 0) continue;
    int64_t from = width ? r * width : at, first = int64_t(s.computed[request]) + 1, count = num_next[r];
    if (width) count = std::min(count, width);
    at += count;
    for (int64_t i = 0; i < count; i++) {
      if (first + i < s.max_len) s.tokens[request * s.max_len + first + i] = drafts[from + i];
      if (sure) sure[request * k + i] = confidence[from + i];
    }
  }
}

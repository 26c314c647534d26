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

static void prepare_step(const State& s, const int32_t* requests, const int32_t* start, const int32_t* unverified, const int32_t* query_start,
                         const int32_t* query_lens, int64_t rows, const int32_t* token_row, int64_t count, const Tokens& out, int32_t* starts,
                         int32_t* seq_lens) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t request = requests[r];
    starts[r] = request < 0 ? 0 : unverified[r] > 0 ? s.computed[request] : start[r];
    seq_lens[r] = int32_t(std::min<int64_t>(starts[r] + query_lens[r], s.covered(request)));
  }
  for (int64_t i = 0; i < count; i++) {
    int64_t row = token_row[i], position = row < 0 ? 0 : starts[row] - query_start[row] + i;
    if (row >= 0 && position < s.covered(requests[row])) out.set(i, s, requests[row], position); else out.clear(i);
  }
}
// new_tokens: `[rows][k + 1]`.
static void accept_drafts(const State& s, const int64_t* own, int64_t k, const int32_t* requests, const int32_t* starts, const int32_t* num_new,
                          const int32_t* num_draft, const int32_t* logits_start, int64_t rows, int32_t* accepted, int64_t* new_tokens) {
  std::fill_n(new_tokens, rows * (k + 1), 0);
  for (int64_t r = 0; r < rows; r++) {
    int64_t request = requests[r], first = int64_t(starts[r]) + num_new[r], count = 0;
    bool samples = logits_start[r] >= 0;
    const int64_t* mine = own + (samples ? logits_start[r] : 0);
    int64_t* row = s.tokens + std::max<int64_t>(request, 0) * s.max_len;
    if (samples) {
      while (count < num_draft[r] && (first + count < s.max_len ? row[first + count] : 0) == mine[count]) count++;
      std::copy_n(mine, count + 1, new_tokens + r * (k + 1));
    }
    accepted[r] = int32_t(count);
    if (request < 0) continue;
    if (samples && first + count < s.max_len) row[first + count] = mine[count];
    s.computed[request] = int32_t(first + count);
  }
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

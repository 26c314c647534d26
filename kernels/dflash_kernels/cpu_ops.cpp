// The operations of a decoder on a CPU, as Python calls them: products by weights that are laid out once
// (`cpu_products.h`), norms, gates and rotation (`cpu_layers.h`), attention (`cpu_attention.h`), the choice of tokens
// (`cpu_choice.h`, `cpu_head.h`), and what a step does around them (`cpu_step.h`). `cpu_ops.py` calls them; each has a torch reference beside its Triton kernel.
//
// A row's result never depends on how many rows there are: sums run in one order for every number of rows and threads.
// Numbers are float32 or bfloat16; sums are float32, and results are rounded where the references round.
// dtype: 0 float32, 1 bfloat16; of KV also 2, FP8. Of a product it is its weight's.

#include "cpu_attention.h"
#include "cpu_choice.h"
#include "cpu_head.h"
#include "cpu_layers.h"
#include "cpu_step.h"

constexpr long BLOCK_ROWS = 256;  // whose results a core's second cache holds until the next operation reads them
constexpr long ROWS_ALONE = 64;   // with fewer rows a thread reads weights for longer than it multiplies them

static int dtype_of(const Weight* w) { return is_float(w->kind) ? 0 : 1; }
static void* at_row(int dtype, const void* p, long row, long step) { return (char*)p + row * step * (dtype == 0 ? 4 : 2); }
static void* between(int dtype, size_t numbers) { return scratch(dtype == 0 ? numbers : (numbers + 1) / 2, BETWEEN); }
// `each(threads, first, count)` over `rows` rows: few at once, by all threads; many in blocks of about equal size, each by a
// thread alone, so that what it makes stays in its caches. A block reads all weights, so where there are few rows for each thread, all
// threads take one block after the other.
template <class Each> static void in_blocks(int threads, long rows, const Each& each) {
  if (rows <= BLOCK_ROWS) return each(threads, 0, rows);
  long workers = std::max(1, threads), blocks = workers * ((rows + workers * BLOCK_ROWS - 1) / (workers * BLOCK_ROWS));
  if (rows < workers * ROWS_ALONE) {
    blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (long block = 0; block < blocks; block++) each(threads, rows * block / blocks, rows * (block + 1) / blocks - rows * block / blocks);
    return;
  }
  share(threads, blocks, 1, [&](long first, long last) {
    for (long block = first; block < last; block++) {
      long begin = rows * block / blocks, end = rows * (block + 1) / blocks;
      if (begin < end) each(1, begin, end - begin);
    }
  });
}

// A decoder layer; biases, the norm of q and k, sinks and scales may be null. rows: which of a call's `Rows` are its own.
struct Layer {
  const Weight *qkv, *output, *gate_up, *down;
  const void *qkv_bias, *output_bias, *gate_up_bias, *down_bias, *input_norm, *post_norm, *qk_norm, *sinks;
  void* cache; float* scales;
  int64_t window, causal, is_gelu, rows;
};
struct Layers { const Layer* first; int64_t count, norm_dtype, qk_norm_dtype, kv_dtype, heads, kv_heads, dim, block_size; double eps; };
struct Rows {
  const int64_t* slots; const int32_t* tables; int64_t table_step;
  const int64_t *first_token, *query_lens, *seq_lens; int64_t count;
};
// A pass of `tokens` tokens over the layers. embedding: where their `ids` are looked up; null where their embeddings are in
// `hidden` already. cos, sin: of `num_positions` positions. captured: of each layer where its output is written as well, rows
// `captured_step` numbers apart, or null. work: for each token numbers of twice the size of all heads, of the hidden state, and of
// two heads.
struct Pass {
  const Weight* embedding;
  const int64_t *ids, *positions;
  const void *cos, *sin;
  int64_t num_positions;
  void *hidden, *normed;
  const void* last_norm;
  void* const* captured;
  int64_t captured_step;
  void* work;
  int64_t tokens;
};
static void add_rows(int dtype, int threads, const void* x, void* total, int64_t rows, int64_t size) {
  share(threads, rows, std::max<long>(1, 16384 / size), [&](long first, long last) {
    for (long i = first * size; i < last * size; i += LANES) {
      int count = int(std::min<long>(LANES, last * size - i));
      if (dtype == 0) store_some((float*)total + i, load_some((float*)total + i, count) + load_some((const float*)x + i, count), count);
      else store_some((bf16*)total + i, load_some((bf16*)total + i, count) + load_some((const bf16*)x + i, count), count);
    }
  });
}

extern "C" {
int64_t dflash_packed_bytes(int64_t kind, int64_t n, int64_t k) { return packed_bytes(kind, n, k); }
// Whether all of some numbers of float32 are those of bfloat16.
int64_t dflash_are_halves(int threads, const uint32_t* numbers, int64_t count) {
  std::atomic<bool> all{true};
  share(threads, count, 16384, [&](long first, long last) {
    for (long i = first; i < last && all.load(std::memory_order_relaxed); i += 1024) {
      uint32_t found = 0;
      for (long j = i; j < std::min(last, i + 1024); j++) found |= numbers[j];
      if (found & 0xffff) all.store(false);
    }
  });
  return all.load();
}
// numbers: in float32 or bfloat16, as those of the weight, which is no grid.
void dflash_pack(int threads, const Weight* w, const void* numbers) {
  if (w->kind == FLOATS) pack_floats((const float*)numbers, w->n, w->k, (float*)w->numbers, threads);
  else if (w->kind == FLOAT_HALVES) pack_halves((const float*)numbers, w->n, w->k, (bf16*)w->numbers, threads);
  else pack_halves((const bf16*)numbers, w->n, w->k, (bf16*)w->numbers, threads);
}
// blocks: of a type of GGUF, rows [first, first + rows) of a weight on grids. Returns whether they can be kept so.
int64_t dflash_pack_blocks(int threads, const Weight* w, int type, const void* blocks, int64_t first, int64_t rows) {
  return pack_blocks(*w, type, (const uint8_t*)blocks, first, rows, threads);
}
// Returns the place of the first of `rows` that is none of the weight's, -1 where all are.
int64_t dflash_unpack_rows(int threads, const Weight* w, const int64_t* rows, int64_t count, void* out) {
  for (long i = 0; i < count; i++)
    if (rows[i] < 0 || rows[i] >= w->n) return i;
  unpack_rows(*w, rows, count, out, threads);
  return -1;
}
void dflash_linear(int threads, const void* x, int64_t x_step, const Weight* weight, const void* bias, void* out, int64_t m) {
  int dtype = dtype_of(weight);
  in_blocks(threads, m, [&](int threads, long first, long count) {
    Product p{at_row(dtype, x, first, x_step), weight, bias, at_row(dtype, out, first, weight->n), count, weight->n, weight->k, x_step};
    if (dtype == 0) linear_float(p, threads);
    else linear_bf16(p, threads);
  });
}
void dflash_norm(int dtype, int weight_dtype, int threads, const void* x, const void* residual, const void* weight, void* normed,
                 void* total, int64_t rows, int64_t size, float eps) {
  share(threads, rows, std::max<long>(1, 16384 / size), [&](long first, long last) {
    long at = first * size, count = last - first;
    if (dtype == 0) {
      const float *a = (const float*)x + at, *b = residual ? (const float*)residual + at : nullptr;
      norm_rows(a, b, (const float*)weight, (float*)normed + at, total ? (float*)total + at : nullptr, count, size, eps);
    } else {
      const bf16 *a = (const bf16*)x + at, *b = residual ? (const bf16*)residual + at : nullptr;
      bf16 *to = (bf16*)normed + at, *sums = total ? (bf16*)total + at : nullptr;
      if (weight_dtype == 0) norm_rows(a, b, (const float*)weight, to, sums, count, size, eps);
      else norm_rows(a, b, (const bf16*)weight, to, sums, count, size, eps);
    }
  });
}
void dflash_gate(int dtype, int threads, int is_gelu, const void* gate_up, void* out, int64_t rows, int64_t inner) {
  share(threads, rows, std::max<long>(1, 8192 / inner), [&](long first, long last) {
    if (dtype == 0) gate_rows((const float*)gate_up + first * 2 * inner, (float*)out + first * inner, last - first, inner, is_gelu);
    else gate_rows((const bf16*)gate_up + first * 2 * inner, (bf16*)out + first * inner, last - first, inner, is_gelu);
  });
}
void dflash_rope_write(int dtype, int norm_dtype, int kv_dtype, int threads, const void* qkv, const void* norm, float eps, const void* cos,
                       const void* sin, const int64_t* slots, void* query, void* cache, float* scales, int64_t tokens,
                       int64_t heads, int64_t kv_heads, int64_t dim) {
  long width = (heads + 2 * kv_heads) * dim;
  Rotation p{qkv, norm, cos, sin, slots, query, cache, scales, tokens, heads, kv_heads, dim, width, eps, norm_dtype, kv_dtype};
  share(threads, tokens, std::max<long>(1, 8192 / width), [&](long first, long last) { rope_any(dtype, p, first, last); });
}
// The context KV of a drafter's layers, to the caches of each. projected: `[tokens][layers][2 * kv_heads * dim]`, norm:
// `[layers][kv_heads * dim]`, or null.
void dflash_context_write(int dtype, int norm_dtype, int kv_dtype, int threads, const void* projected, const void* norm, float eps,
                          const void* cos, const void* sin, const int64_t* slots, void* const* caches, int64_t layers, int64_t tokens,
                          int64_t kv_heads, int64_t dim) {
  long width = 2 * kv_heads * dim, step = layers * width;
  share(threads, tokens, std::max<long>(1, 8192 / step), [&](long first, long last) {
    for (long i = 0; i < layers; i++) {
      const void* own = norm ? at_row(norm_dtype, norm, i, kv_heads * dim) : nullptr;
      Rotation p{at_row(dtype, projected, i, width), own, cos, sin, slots, nullptr, caches[i], nullptr, tokens, 0, kv_heads, dim, step, eps,
                 norm_dtype, kv_dtype};
      rope_any(dtype, p, first, last);
    }
  });
}
void dflash_attend(int dtype, int kv_dtype, int threads, const void* query, const void* cache, const float* scales, void* out,
                   const int32_t* tables, int64_t table_step, const int64_t* first_token, const int64_t* query_lens,
                   const int64_t* seq_lens, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size,
                   int causal, int64_t window, const void* sinks, float scale) {
  Attention p{query, cache, scales, out, tables, first_token, query_lens, seq_lens, sinks, rows, table_step, heads, kv_heads,
              dim, block_size, window, scale, causal, kv_dtype};
  if (dtype == 0) attend_any<float>(p, threads); else attend_any<bf16>(p, threads);
}
void dflash_choose(int dtype, int threads, const void* logits, int64_t rows, int64_t vocab, int64_t step, const float* temperature,
                   const int64_t* seeds, const int64_t* positions, const float* lowest, const int64_t* ids, int64_t* out) {
  Choice p{logits, rows, vocab, step, temperature, seeds, positions, lowest, ids};
  if (dtype == 0) choose<float>(p, threads, out); else choose<bf16>(p, threads, out);
}
// out: of each row the lowest logit that its filters keep.
void dflash_lowest_kept(int dtype, int threads, const void* logits, int64_t rows, int64_t vocab, int64_t step, const float* temperature,
                        const int64_t* top_k, const float* top_p, const float* min_p, float* out) {
  share(threads, rows, 1, [&](long first, long last) {
    for (long row = first; row < last; row++) {
      const void* at = at_row(dtype, logits, row, step);
      auto kept = [&](auto* logits) { return lowest_kept(logits, vocab, temperature[row], top_k[row], top_p[row], min_p[row]); };
      out[row] = dtype == 0 ? kept((const float*)at) : kept((const bf16*)at);
    }
  });
}
void dflash_penalise(int threads, const Penalties* p, float* logits) {
  share(threads, p->rows, 1, [&](long first, long last) {
    for (long row = first; row < last; row++) count_and_penalise(*p, row, logits);
  });
}
// ids: int64 `[rows][num_ids]`. out: `[rows][2 * (num_ids + num_top)]`.
void dflash_ranked_logprobs(int dtype, int threads, const void* logits, int64_t rows, int64_t vocab, int64_t step, const int64_t* ids,
                            int64_t num_ids, int64_t num_top, double* out) {
  share(threads, rows, std::max<long>(1, 16384 / vocab), [&](long first, long last) {
    for (long row = first; row < last; row++) {
      const void* at = at_row(dtype, logits, row, step);
      auto rank = [&](auto* logits) { rank_row(logits, vocab, ids + row * num_ids, num_ids, num_top, out + row * 2 * (num_ids + num_top)); };
      if (dtype == 0) rank((const float*)at); else rank((const bf16*)at);
    }
  });
}
// How sure each row of logits is of a column, within `most` of 0.
void dflash_log_odds(int dtype, int threads, const void* logits, int64_t rows, int64_t vocab, int64_t step, const int64_t* ids, float most,
                     float* out) {
  share(threads, rows, std::max<long>(1, 16384 / vocab), [&](long first, long last) {
    for (long row = first; row < last; row++) {
      const void* at = at_row(dtype, logits, row, step);
      float odds = dtype == 0 ? log_odds_of((const float*)at, vocab, ids[row]) : log_odds_of((const bf16*)at, vocab, ids[row]);
      out[row] = odds == odds ? std::min(std::max(odds, -most), most) : -most;
    }
  });
}
// A product and what follows it, without a call between them. Packed weights and their biases; `rope`: as of dflash_rope_write.
void dflash_linear_rope_write(int norm_dtype, int kv_dtype, int threads, const void* x, int64_t x_step, const Weight* weight,
                              const void* bias, const void* norm, float eps, const void* cos, const void* sin,
                              const int64_t* slots, void* query, void* cache, float* scales, int64_t tokens, int64_t heads,
                              int64_t kv_heads, int64_t dim) {
  int dtype = dtype_of(weight);
  in_blocks(threads, tokens, [&](int threads, long first, long count) {
    void* qkv = between(dtype, count * weight->n);
    dflash_linear(threads, at_row(dtype, x, first, x_step), x_step, weight, bias, qkv, count);
    dflash_rope_write(dtype, norm_dtype, kv_dtype, threads, qkv, norm, eps, at_row(dtype, cos, first, dim), at_row(dtype, sin, first, dim),
                      slots + first, at_row(dtype, query, first, heads * dim), cache, scales, count, heads, kv_heads, dim);
  });
}
void dflash_linear_norm(int norm_dtype, int threads, const void* x, int64_t x_step, const Weight* weight, const void* bias,
                        const void* residual, const void* norm, void* normed, void* total, int64_t m, float eps) {
  int dtype = dtype_of(weight);
  in_blocks(threads, m, [&](int threads, long first, long count) {
    void* product = between(dtype, count * weight->n);
    dflash_linear(threads, at_row(dtype, x, first, x_step), x_step, weight, bias, product, count);
    dflash_norm(dtype, norm_dtype, threads, product, at_row(dtype, residual, first, weight->n), norm, at_row(dtype, normed, first, weight->n),
                at_row(dtype, total, first, weight->n), count, weight->n, eps);
  });
}
void dflash_gated_mlp(int threads, int is_gelu, const void* x, int64_t x_step, const Weight* gate_up, const void* gate_up_bias,
                      const Weight* down, const void* down_bias, void* out, int64_t m) {
  int dtype = dtype_of(gate_up);
  in_blocks(threads, m, [&](int threads, long first, long count) {
    void* gated = between(dtype, count * down->k);
    const void* from = at_row(dtype, x, first, x_step);
    if (!linear_gated(Product{from, gate_up, gate_up_bias, gated, count, down->k, gate_up->k, x_step, is_gelu != 0}, threads)) {
      gated = between(dtype, 3 * count * down->k);
      void* both = at_row(dtype, gated, count, down->k);
      dflash_linear(threads, from, x_step, gate_up, gate_up_bias, both, count);
      dflash_gate(dtype, threads, is_gelu, both, gated, count, down->k);
    }
    dflash_linear(threads, gated, down->k, down, down_bias, at_row(dtype, out, first, down->n), count);
  });
}
// All layers of a decoder. Leaves in `hidden` what the last layer gives out, and, where there is a `last_norm`, the norm of it in
// `normed`. Returns the place of the first token whose id or position is none, and does nothing then; -1 where there is none.
int64_t dflash_layers(int threads, const Layers* all, const Rows* rows, const Pass* pass) {
  const Layers& s = *all;
  const Pass& p = *pass;
  int dtype = dtype_of(s.first->qkv);
  long tokens = p.tokens, size = s.first->output->n, heads_size = s.heads * s.dim, bytes = dtype == 0 ? 4 : 2;
  for (long t = 0; t < tokens; t++)
    if (p.positions[t] < 0 || p.positions[t] >= p.num_positions) return t;
  if (long outside = p.embedding ? dflash_unpack_rows(threads, p.embedding, p.ids, tokens, p.hidden) : -1; outside >= 0) return outside;
  void *hidden = p.hidden, *normed = p.normed, *query = p.work, *attended = at_row(dtype, query, tokens, heads_size);
  void *added = at_row(dtype, attended, tokens, heads_size), *cos = at_row(dtype, added, tokens, size), *sin = at_row(dtype, cos, tokens, s.dim);
  for (long t = 0; t < tokens; t++) {
    std::memcpy(at_row(dtype, cos, t, s.dim), at_row(dtype, p.cos, p.positions[t], s.dim), s.dim * bytes);
    std::memcpy(at_row(dtype, sin, t, s.dim), at_row(dtype, p.sin, p.positions[t], s.dim), s.dim * bytes);
  }
  dflash_norm(dtype, s.norm_dtype, threads, hidden, nullptr, s.first->input_norm, normed, nullptr, tokens, size, s.eps);
  for (long i = 0; i < s.count; i++) {
    const Layer& w = s.first[i];
    const Rows& r = rows[w.rows];
    dflash_linear_rope_write(s.qk_norm_dtype, s.kv_dtype, threads, normed, size, w.qkv, w.qkv_bias, w.qk_norm, s.eps, cos, sin, r.slots, query,
                             w.cache, w.scales, tokens, s.heads, s.kv_heads, s.dim);
    dflash_attend(dtype, s.kv_dtype, threads, query, w.cache, w.scales, attended, r.tables, r.table_step, r.first_token, r.query_lens,
                  r.seq_lens, r.count, s.heads, s.kv_heads, s.dim, s.block_size, w.causal, w.window, w.sinks, float(1 / std::sqrt(double(s.dim))));
    dflash_linear_norm(s.norm_dtype, threads, attended, heads_size, w.output, w.output_bias, hidden, w.post_norm, normed, hidden, tokens, s.eps);
    dflash_gated_mlp(threads, w.is_gelu, normed, size, w.gate_up, w.gate_up_bias, w.down, w.down_bias, added, tokens);
    const void* next = i + 1 < s.count ? s.first[i + 1].input_norm : p.last_norm;
    if (next) dflash_norm(dtype, s.norm_dtype, threads, added, hidden, next, normed, hidden, tokens, size, s.eps);
    else add_rows(dtype, threads, added, hidden, tokens, size);
    if (p.captured[i])
      for (long t = 0; t < tokens; t++) std::memcpy(at_row(dtype, p.captured[i], t, p.captured_step), at_row(dtype, hidden, t, size), size * bytes);
  }
  return -1;
}
// Around the models. state: as `State` has it. tokens: ids, positions and slots, each of as many numbers as there are tokens.
int64_t dflash_lay_out(const State* state, const Row* rows, int64_t count, int64_t tokens, int64_t table_width, int32_t* narrow, int64_t* wide) {
  return lay_out(*state, rows, count, tokens, table_width, narrow, wide);
}
void dflash_accept(const State* state, const int64_t* own, int64_t k, const int32_t* layout, int64_t rows, int64_t* results) {
  accept_drafts(*state, own, k, layout, rows, results);
}
int64_t dflash_take_context(const int32_t* computed, int64_t block_size, const Waiting* waiting, const int32_t* layout, int64_t rows, int64_t may_wait,
                            const int64_t* positions, const int64_t* slots, const void* features, const Context* out, int64_t room) {
  return take_context(computed, block_size, *waiting, layout, rows, may_wait != 0, positions, slots, (const char*)features, *out, room);
}
void dflash_prepare_draft(const State* state, const int32_t* requests, const int32_t* num_next, int64_t rows, int64_t width,
                          int64_t placeholder, int64_t lookahead_base, int64_t* tokens, int32_t* query_lens, int32_t* seq_lens) {
  Tokens out{tokens, tokens + rows * width, tokens + 2 * rows * width};
  prepare_drafts(*state, requests, num_next, rows, width, placeholder, lookahead_base, out, query_lens, seq_lens);
}
void dflash_store_drafts(const State* state, const int32_t* requests, const int32_t* num_next, int64_t rows, const int64_t* drafts,
                         const float* confidence, int64_t width, float* sure, int64_t k) {
  store_drafts(*state, requests, num_next, rows, drafts, confidence, width, sure, k);
}
// As `likeliest`, of rows that are normed.
int64_t dflash_likeliest(int threads, const void* x, int64_t x_step, const Weight* weight, const CoarseHead* head,
                         const Sampling* sampling, int64_t rows, int64_t* ids) {
  Product p{x, weight, nullptr, nullptr, rows, weight->n, weight->k, x_step};
  return dtype_of(weight) == 0 ? likeliest<float>(p, *head, *sampling, threads, ids) : likeliest<bf16>(p, *head, *sampling, threads, ids);
}
int64_t dflash_coarse_rows_at_most(int64_t dtype) { return coarse_rows_at_most(dtype == 0); }
// Whether the processor multiplies bfloat16, attention among it, by AMX or AVX-512.
int64_t dflash_has_pairs() { return HAS_PAIRS; }
// Runs on a processor for the first time: 0 where it does what it should.
int dflash_trial() {
  const float number[] = {1.0f, 0.5f};
  int wrong = 0;
  for (int64_t kind = 0; kind < KINDS; kind++) {
    std::vector<float> w(64 * 32, 1.0f), out(64), x(64, 1.0f);
    std::vector<bf16> halves(64 * 32, bf16{0x3f80});
    std::vector<uint8_t> packed(packed_bytes(kind, 32, 64));
    Weight weight{kind, 32, 64, packed.data(), nullptr, 0};
    if (!is_grid(kind)) dflash_pack(2, &weight, kind == HALVES ? (void*)halves.data() : w.data());
    else {
      std::vector<uint8_t> blocks(64 * 34, 1);  // of Q8_0, all codes 1
      for (int i = 0; i < 64; i++) blocks[i * 34] = 0, blocks[i * 34 + 1] = 0x3c;  // steps of 1
      for (int i = 0; i < 64 && grid_of(kind).bits == 4; i++) {  // of Q4_1, in 20 bytes
        std::fill_n(blocks.begin() + i * 20, 20, uint8_t(0x11));
        blocks[i * 20] = blocks[i * 20 + 2] = blocks[i * 20 + 3] = 0, blocks[i * 20 + 1] = 0x3c;
      }
      wrong |= !dflash_pack_blocks(2, &weight, grid_of(kind).bits == 4 ? Q4_1 : Q8_0, blocks.data(), 0, 32);
    }
    dflash_linear(2, is_float(kind) ? (void*)x.data() : halves.data(), 64, &weight, nullptr, out.data(), 1);
    wrong |= (is_float(kind) ? out[31] : to_float(((bf16*)out.data())[31])) != 64.0f;
  }
  std::vector<bf16> query(64, bf16{0x3f80}), cache(2 * 16 * 64, bf16{0x3f80}), attended(64);
  int32_t table = 0;
  int64_t zero = 0, one = 1, three = 3;
  dflash_attend(1, 1, 1, query.data(), cache.data(), nullptr, attended.data(), &table, 1, &zero, &one, &three, 1, 1, 1, 64, 16, 1, 0,
                nullptr, number[1]);
  return wrong || to_float(attended[63]) != number[0];
}
}

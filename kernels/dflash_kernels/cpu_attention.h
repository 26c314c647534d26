// Attention over KV blocks in place, some positions at a time with a running softmax.

#pragma once
#include "cpu_products.h"

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LAG = 8.0f;        // powers of two by which scores may pass the maximum that they are weighed by
constexpr int TILE_QUERIES = 144;  // queries times heads that share their KV, by tiles
constexpr int TERM_QUERIES = 288;  // in float32, by tiles of terms
constexpr int ALIKE = 512;         // a row of no more queries in float32 has the bits of each query alone, as drafts need it that are verified
constexpr int TOGETHER = 64;       // of those, in rows whose heads are read together
constexpr int FEW = 16;            // of those, of `attend_few`

struct Attention {
  const void *query, *cache; const float* scales; void* out;
  const int32_t* tables; const int64_t *first_token, *query_lens, *seq_lens; const void* sinks;
  long rows, table_step, heads, kv_heads, dim, block_size, window;
  float scale; int causal, kv_dtype;
};
// POSITIONS rows of `[dim]`, of which `row(t, d)` gives 16 numbers, -> `[dim][POSITIONS]`.
template <class Row> static void transpose(const Row& row, float* to, long dim) {
#if defined(__AVX512F__)
  for (long d = 0; d < dim; d += 16)
    for (long t = 0; t < POSITIONS; t += 16) {
      __m512 r[16], s[16];
      for (int i = 0; i < 16; i++) r[i] = (__m512)row(t + i, d);
      for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
      }
      for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
          r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(s[i + j]), _mm512_castps_pd(s[i + j + 2])));
          r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(s[i + j]), _mm512_castps_pd(s[i + j + 2])));
        }
      for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
      }
      for (int i = 0; i < 4; i++) {
        float* at = to + (d + i) * POSITIONS + t;
        _mm512_storeu_ps(at, _mm512_shuffle_f32x4(s[i], s[i + 8], 0x88));
        _mm512_storeu_ps(at + 4 * POSITIONS, _mm512_shuffle_f32x4(s[i + 4], s[i + 12], 0x88));
        _mm512_storeu_ps(at + 8 * POSITIONS, _mm512_shuffle_f32x4(s[i], s[i + 8], 0xdd));
        _mm512_storeu_ps(at + 12 * POSITIONS, _mm512_shuffle_f32x4(s[i + 4], s[i + 12], 0xdd));
      }
    }
#elif defined(__AVX__)
  for (long d = 0; d < dim; d += 8)
    for (long t = 0; t < POSITIONS; t += 8) {
      __m256 r[8], s[8];
      for (int i = 0; i < 8; i++) r[i] = (__m256)(d % 16 ? row(t + i, d - 8).upper : row(t + i, d).lower);
      for (int i = 0; i < 8; i += 2) s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
      for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
          r[i + 2 * j] = _mm256_shuffle_ps(s[i + j], s[i + j + 2], 0x44);
          r[i + 2 * j + 1] = _mm256_shuffle_ps(s[i + j], s[i + j + 2], 0xee);
        }
      for (int i = 0; i < 4; i++) {
        float* at = to + (d + i) * POSITIONS + t;
        _mm256_storeu_ps(at, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(at + 4 * POSITIONS, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
      }
    }
#else
  for (long t = 0; t < POSITIONS; t++)
    for (long d = 0; d < dim; d += LANES) {
      float numbers[LANES];
      store(numbers, row(t, d));
      for (int i = 0; i < LANES; i++) to[(d + i) * POSITIONS + t] = numbers[i];
    }
#endif
}
// Where 16 positions lie in the cache, in heads: keys of head 0. Their block holds all of them.
static inline long tile_at(const Attention& p, const int32_t* table, long position) {
  long block = position / p.block_size;
  return (long(table[block]) * p.block_size + position - block * p.block_size) * 2 * p.kv_heads;
}
// Queries [first, last) of a row and of heads [head, last_head) of KV, which a thread computes.
struct Piece { int row, head, last_head, first, last; long work; };
// The positions that some of its queries see.
struct Seen { long begin, end; };
static inline Seen seen_by(const Attention& p, const Piece& piece) {
  long start = p.seq_lens[piece.row] - p.query_lens[piece.row] + piece.first;
  return {p.window ? std::max<long>(0, start - p.window + 1) : 0, p.causal ? start + (piece.last - piece.first) : p.seq_lens[piece.row]};
}
// With tiles one head ahead, into the first cache; else 64 positions ahead, into the second.
#if defined(__AMX_BF16__)
constexpr bool FAR_NEXT = false;
#else
constexpr bool FAR_NEXT = true;
#endif
// The keys and values of some heads that are read next, in the order of their addresses. They are fetched a few lines at a time, between what
// else is done: a core has some 16 to 24 lines under way at once, and one that is asked for more waits for them.
struct NextKV {
  const char *tile[POSITIONS / 16], *line = nullptr;
  long step = 0, beside = 0, in_run = 0, of_tile = 1, runs = 0, run = 0, left = 0;  // positions lie `step` apart, values `beside` their keys; lines of a run
  // Goes to the next run: what lies side by side.
  bool next_run() {
    if (run >= runs) return false;
    long in_tile = run % of_tile;
    line = tile[run / of_tile] + in_tile / 2 * step + in_tile % 2 * beside, left = in_run, run++;
    return true;
  }
  // Into the first cache, or with FAR into the second.
  template <bool FAR> void fetch(long lines) {
    while (lines > 0 && (left > 0 || next_run())) {
      long now = std::min(lines, left);
      const char* at = line;
      for (long i = 0; i < now; i++, at += 64) FAR ? fetch_line_far(at) : fetch_line(at);
      line = at, lines -= now, left -= now;
    }
  }
};
template <class KV> static inline NextKV next_kv(const Attention& p, const int32_t* table, long base, long end, long head, long last_head) {
  NextKV next;
  if (p.block_size % 16) return next;
  bool whole = last_head - head == p.kv_heads;  // of all heads, so 16 positions are one run, else the keys of a position and its values
  long of_head = p.dim * long(sizeof(KV)), count = std::max<long>(0, std::min<long>(POSITIONS, end - base));
  next.beside = p.kv_heads * of_head, next.step = 2 * next.beside, next.of_tile = whole ? 1 : 32;
  next.in_run = ((whole ? 16 * next.step : (last_head - head) * of_head) + 63) / 64;
  next.runs = whole ? (count + 15) / 16 : 2 * count;
  for (long t = 0; t < count; t += 16) next.tile[t / 16] = (const char*)p.cache + (tile_at(p, table, base + t) + head) * of_head;
  return next;
}
// What is read after the positions at `base` for all heads of a piece: its next ones, or the first ones of the piece that is computed `after` it.
template <class KV> static inline NextKV next_of(const Attention& p, const Piece& piece, const Piece* after, long base) {
  auto from = [&](const Piece& of, long first, long end) {
    return next_kv<KV>(p, p.tables + of.row * p.table_step, first, end, of.head, of.last_head);
  };
  long end = seen_by(p, piece).end;
  if (base + POSITIONS < end || !after) return from(piece, base + POSITIONS, end);
  Seen seen = seen_by(p, *after);
  return from(*after, seen.begin / POSITIONS * POSITIONS, seen.end);
}
// The softmax of a query over POSITIONS scores, `scale` times which are powers of two. They become weights: those of [hidden, seen) are not 0.
// The maximum moves where a score passes it by LAG. total: of each lane, as `output`, `[dim]`, by the maximum so far.
static inline void weigh_query(float* scores, float scale, long hidden, long seen, float& most, float* total, float* output, long dim) {
  Floats x[VECTORS];
  for (int j = 0; j < VECTORS; j++) x[j] = load(scores + j * LANES);
  if (hidden > 0 || seen < POSITIONS)
    for (int j = 0; j < VECTORS; j++) {
      Ints t = lanes() + j * LANES;
      x[j] = select((t < int(seen)) & (t >= int(hidden)), x[j], all(-INFINITY));
    }
  Floats top = x[0], sums = load(total);
  for (int j = 1; j < VECTORS; j++) top = larger(x[j], top);
  if (any(top * scale > most + LAG)) {
    float now = largest(top) * scale, keep = std::exp2(most - now);
    most = now;
    sums *= keep;
    for (long c = 0; c < dim; c += LANES) store(output + c, load(output + c) * keep);
  }
  float shift = most == -INFINITY ? 0.0f : most;
  for (int j = 0; j < VECTORS; j++) {
    Floats weight = vexp2(rounded_by_itself(x[j] * scale) - shift);  // of the maximum exactly 1, however large it is
    store(scores + j * LANES, weight);
    sums += weight;
  }
  store(total, sums);
}
// All heads of a piece read some positions before they read the next, which lie beside them.
template <class T, class KV> static void attend_piece(const Attention& p, const Piece& piece, const Piece* after) {
  long row = piece.row, head = piece.head, last_head = piece.last_head, first = piece.first, last = piece.last;
  auto [begin, end] = seen_by(p, piece);
  long group = p.heads / p.kv_heads, dim = p.dim, queries = (last - first) * group, of_head = queries * (2 * dim + 1 + LANES);
  float* memory = scratch(POSITIONS * dim * 2 + queries * POSITIONS + (last_head - head) * of_head);
  float *value = memory, *turned = value + POSITIONS * dim;
  float *scores = turned + POSITIONS * dim, *kept = scores + queries * POSITIONS;  // of each head: queries, outputs, totals, maxima
  // Few queries read values where they are.
  bool in_place = std::is_same<KV, float>::value && !p.scales && p.block_size % 16 == 0 && queries <= AT_ONCE;
  long token = p.first_token[row] + first, start = p.seq_lens[row] - p.query_lens[row] + first;
  for (long of = head; of < last_head; of++) {
    float *query = kept + (of - head) * of_head, *output = query + queries * dim, *total = output + queries * dim, *most = total + queries * LANES;
    for (long q = 0; q < queries; q++) {
      const T* from = (const T*)p.query + ((token + q / group) * p.heads + of * group + q % group) * dim;
      for (long c = 0; c < dim; c += LANES) store(query + q * dim + c, load(from + c)), store(output + q * dim + c, Floats{});
      most[q] = p.sinks ? to_float(((const T*)p.sinks)[of * group + q % group]) * LOG2_E : -INFINITY;
      store(total + q * LANES, Floats{});
      if (p.sinks) total[q * LANES] = 1.0f;
    }
  }
  const int32_t* table = p.tables + row * p.table_step;
  for (long base = begin / POSITIONS * POSITIONS; base < end; base += POSITIONS) {
    long count = std::min<long>(POSITIONS, end - base);
    // What the window hides from all queries is not read: its blocks may be another request's by now.
    long unseen = std::max<long>(0, begin - base);
    NextKV next;
    if (queries <= TOGETHER) next = next_of<KV>(p, piece, after, base);
    for (long of = head; of < last_head; of++) {
      float *query = kept + (of - head) * of_head, *output = query + queries * dim, *total = output + queries * dim, *most = total + queries * LANES;
      const KV* keys[POSITIONS];
      float scales[POSITIONS];
      if (unseen > 0) std::memset(value, 0, unseen * dim * sizeof(float));
      for (long t = unseen; t < count;) {  // a block of KV after the other
        long offset = (base + t) % p.block_size, run = std::min(count - t, p.block_size - offset);
        long at = (long(table[(base + t) / p.block_size]) * p.block_size + offset) * 2 * p.kv_heads + of;
        for (long stop = t + run; t < stop; t++, at += 2 * p.kv_heads) {
          keys[t] = (const KV*)p.cache + at * dim;
          if (in_place) continue;
          const KV* values = keys[t] + p.kv_heads * dim;
          float* v = value + t * dim;
          if (p.scales) {
            float vs = p.scales[at + p.kv_heads];
            scales[t] = p.scales[at];
            for (long c = 0; c < dim; c += LANES) store(v + c, rounded<T>(load(values + c) * vs));
          } else {
            for (long c = 0; c < dim; c += LANES) store(v + c, load(values + c));
          }
        }
      }
      auto turn = [&](auto numbers) {
        transpose([&](long t, long d) {
          if (t % 2 == 0) next.template fetch<true>(std::max<long>(1, sizeof(KV)));  // as many as are read now
          return t >= unseen && t < count ? numbers(t, d) : Floats{};
        }, turned, dim);
      };
      if (p.scales) turn([&](long t, long d) { return rounded<T>(load(keys[t] + d) * scales[t]); });
      else turn([&](long t, long d) { return load(keys[t] + d); });
      for (long q = 0; q < queries; q += AT_ONCE)
        products(int(std::min<long>(AT_ONCE, queries - q)), VECTORS, query + q * dim, dim, turned, POSITIONS, LANES, dim, false,
                 scores + q * POSITIONS, POSITIONS);
      for (long q = 0; q < queries; q++) {
        long position = start + q / group, seen = p.causal ? std::min(count, position + 1 - base) : count, hidden = 0;
        if (p.window) {
          hidden = std::max<long>(0, position - p.window + 1 - base);
          if (!p.causal) seen = std::min(seen, position + p.window - base);
        }
        weigh_query(scores + q * POSITIONS, p.scale * LOG2_E, hidden, seen, most[q], total + q * LANES, output + q * dim, dim);
      }
      // Values by the weights of some queries. The sums of these positions are added to those of the ones before at last, which rounds less.
      for (long c = 0; c < dim; c += VECTORS * LANES)
        for (long q = 0; q < queries; q += AT_ONCE) {
          int rows = int(std::min<long>(AT_ONCE, queries - q)), vectors = int(std::min<long>(VECTORS, (dim - c) / LANES));
          float sums[AT_ONCE * VECTORS * LANES];
          auto weigh = [&](const float* from, long step, long t, long many, bool add) {
            products(rows, vectors, scores + q * POSITIONS + t, POSITIONS, from + c, step, LANES, many, add, sums, VECTORS * LANES);
          };
          if (!in_place) weigh(value, dim, 0, count, false);
          for (long t = unseen, many; in_place && t < count; t += many) {
            many = std::min(count, (t / 16 + 1) * 16) - t;
            weigh((const float*)keys[t] + p.kv_heads * dim, 2 * p.kv_heads * dim, t, many, t > unseen);
          }
          for (int r = 0; r < rows; r++)
            for (int j = 0; j < vectors * LANES; j += LANES) {
              float* to = output + (q + r) * dim + c + j;
              store(to, load(to) + load(sums + r * VECTORS * LANES + j));
            }
        }
    }
  }
  for (long of = head; of < last_head; of++) {
    float *output = kept + (of - head) * of_head + queries * dim, *total = output + queries * dim;
    for (long q = 0; q < queries; q++) {
      T* to = (T*)p.out + ((token + q / group) * p.heads + of * group + q % group) * dim;
      float of_all = sum(load(total + q * LANES)), inverse = of_all > 0 ? 1.0f / of_all : 0.0f;
      for (long c = 0; c < dim; c += LANES) store(to + c, load(output + q * dim + c) * inverse);
    }
  }
}
#if HAS_PAIRS
// A square of 16 by 16 words turned over; rows lie `from_step` and `to_step` words apart.
static inline void turn_words(const uint32_t* from, long from_step, uint32_t* to, long to_step) {
  __m512i r[16], s[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * from_step);
  for (int i = 0; i < 16; i += 2) {
    s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(s[i + j], s[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(s[i + j], s[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    _mm512_storeu_si512(to + i * to_step, _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88));
    _mm512_storeu_si512(to + (i + 4) * to_step, _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88));
    _mm512_storeu_si512(to + (i + 8) * to_step, _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd));
    _mm512_storeu_si512(to + (i + 12) * to_step, _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd));
  }
}
// Calls `each(t, at)` with the place, in heads, of the keys of `count` positions from `base` on; values are `kv_heads` on.
template <class Each> static inline void each_key(const Attention& p, const int32_t* table, long base, long count, long head, const Each& each) {
  long block = base / p.block_size, offset = base % p.block_size;
  for (long t = 0; t < count; block++, offset = 0) {
    long stop = std::min(count, t + p.block_size - offset), at = (long(table[block]) * p.block_size + offset) * 2 * p.kv_heads + head;
    for (; t < stop; t++, at += 2 * p.kv_heads) each(t, at);
  }
}
// A head as bfloat16, zeros up to `deep`.
template <class KV> static inline void read_head(const KV* from, const float* scale, long dim, long deep, bf16* to) {
  for (long c = 0; c < dim; c += LANES) {
    if constexpr (sizeof(KV) == 2) put(to + c, vector_at<Halves>(from + c));
    else store(to + c, load(from + c) * (scale ? *scale : 1.0f));
  }
  if (dim < deep) put(to + dim, Halves{});
}
// Keys, or values, of POSITIONS positions, in tiles of 16: where each begins, and how many bytes its rows lie apart.
struct Tiles { const bf16* tile[POSITIONS / 16]; long step[POSITIONS / 16]; };
// Positions [base, base + count) as tiles: keys where they are, or as `key` `[POSITIONS][deep]`, values as pairs of neighbouring
// positions, `[POSITIONS / 2][deep]`. Zeros follow to a multiple of 32 positions, and from the heads' size on. Positions before `begin`,
// which a window hides from all queries, are not read, but for those that share a block with it, and may be zeros as well.
template <class KV>
static Tiles read_kv(const Attention& p, const int32_t* table, long begin, long base, long count, long head, long deep, bf16* key,
                     uint32_t* pairs, NextKV& next) {
  const KV* cache = (const KV*)p.cache;
  bf16* plain = (bf16*)pairs + POSITIONS * deep;  // values as they are, where they are not read in place
  bool in_place = sizeof(KV) == 2 && p.dim == deep && p.block_size % 16 == 0;
  long width = rounded_up(count, DEEP);
  Tiles keys, values;
  for (long t = 0; t < width; t += 16) {
    long rows = std::max<long>(0, std::min<long>(16, count - t)), i = t / 16, unseen = std::min(std::max<long>(0, begin - base - t), rows);
    if (in_place && rows == 16 && unseen < 16) {
      keys.tile[i] = (const bf16*)(cache + (tile_at(p, table, base + t) + head) * p.dim), values.tile[i] = keys.tile[i] + p.kv_heads * p.dim;
      keys.step[i] = values.step[i] = 4 * p.kv_heads * p.dim;
      continue;
    }
    bf16 *to = key + t * deep, *beside = plain + t * deep;
    keys.tile[i] = to, values.tile[i] = beside, keys.step[i] = values.step[i] = deep * 2;
    std::memset((void*)to, 0, unseen * deep * 2);
    std::memset((void*)beside, 0, unseen * deep * 2);
    each_key(p, table, base + t + unseen, rows - unseen, head, [&](long r, long at) {
      read_head(cache + at * p.dim, p.scales ? p.scales + at : nullptr, p.dim, deep, to + (unseen + r) * deep);
      read_head(cache + (at + p.kv_heads) * p.dim, p.scales ? p.scales + at + p.kv_heads : nullptr, p.dim, deep, beside + (unseen + r) * deep);
    });
    std::memset((void*)(to + rows * deep), 0, (16 - rows) * deep * 2);
    std::memset((void*)(beside + rows * deep), 0, (16 - rows) * deep * 2);
  }
  const __m512i evens = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i odds = _mm512_add_epi16(evens, _mm512_set1_epi16(16));
  for (long t = 0; t < width; t += 2) {
    const char *from = (const char*)values.tile[t / 16] + t % 16 * values.step[t / 16], *after = from + values.step[t / 16];
    if (t % 4 == 0) next.fetch<FAR_NEXT>(deep / 16);
    for (long c = 0; c < deep; c += 32) {
      __m512i first = _mm512_loadu_si512(from + c * 2), second = _mm512_loadu_si512(after + c * 2);
      _mm512_storeu_si512(pairs + t / 2 * deep + c, _mm512_permutex2var_epi16(first, evens, second));
      _mm512_storeu_si512(pairs + t / 2 * deep + c + 16, _mm512_permutex2var_epi16(first, odds, second));
    }
  }
  return keys;
}
// Pairs of values, `[width / 2][deep]`, turned over: `[deep][POSITIONS]`.
static void turn_values(const uint32_t* pairs, long width, long deep, bf16* value) {
  for (long t = 0; t < width / 2; t += 16)
    for (long c = 0; c < deep; c += 16) turn_words(pairs + t * deep + c, deep, (uint32_t*)value + c * (POSITIONS / 2) + t, POSITIONS / 2);
}
// 2 to the power of x; 0 below the smallest normal number.
static inline Floats power_of_two(Floats x) {
  Floats t = x + 12582912.0f, r = x - (t - 12582912.0f), y = all(9.58285294e-3f);
  y = y * r + 5.59064262e-2f;
  y = y * r + 2.40240991e-1f;
  y = y * r + 6.93124175e-1f;
  y = y * r + 1.0f;
  __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_add_epi32(normal, (__m512i)y, _mm512_slli_epi32((__m512i)t, 23));
}
// A total so far, and two sums that come to it: in one order of roundings, wherever it is compiled.
static inline Floats total_of(Floats total, Floats keep, Floats left, Floats right) {
  return (Floats)_mm512_fmadd_ps((__m512)total, (__m512)keep, (__m512)left) + right;
}
// Whether queries at positions [start, last] all see all of a whole chunk at `base`.
static inline bool sees_all(const Attention& p, long start, long last, long base, long count) {
  if (count < POSITIONS || (p.causal && base + POSITIONS > start + 1)) return false;
  return !p.window || (base > last - p.window && (p.causal || base + POSITIONS <= start + p.window));
}
constexpr int NUM_TERMS = 3;  // numbers of bfloat16 whose sum is one of float32
// The terms of two neighbouring numbers as pairs, each `apart` words from the one before.
static inline void put_pair_terms(Floats even, Floats odd, uint32_t* to, long apart) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  for (int i = 0; i < NUM_TERMS; i++, to += apart) {
    __m512i first = _mm512_and_si512((__m512i)even, upper), second = _mm512_and_si512((__m512i)odd, upper);
    _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(first, 16), second));
    even -= (Floats)first, odd -= (Floats)second;
  }
}
// The softmax of 16 queries over `width` scores `[width][16]`: running maxima and totals, and weights as pairs of
// neighbouring positions, `[width / 2][16][2]`. The scale is above 0. TERMS: weights of float32 as terms, `[3][POSITIONS / 2][16][2]`.
template <bool TERMS> struct Softmax {
  static constexpr int CHAINS = 4;  // of maxima and of sums, none of which waits for another
  const float* scores;
  bf16* weights;
  float scale;
  int width = 0, done = 0;
  Floats shift, keep, sums[CHAINS];
  static Floats power(Floats x) {
    if constexpr (!TERMS) return power_of_two(x);
    else return select(x > -60.0f, vexp(x), Floats{});  // what float32 has no place for beside a maximum, nor its terms at all
  }
  // Finds the maxima. What the output so far is to be multiplied by, `keep`, is 1 until scores pass the maximum by LAG.
  void begin(const Attention& p, float* of, long base, long count, int of_width, Ints position, bool all_seen, float* most, bf16* to) {
    scores = of, weights = to, width = of_width, done = 0, scale = p.scale * (TERMS ? 1.0f : LOG2_E);
    if (!all_seen) {
      Ints seen = Ints{} + int(count), hidden{};
      if (p.causal) { Ints own = position + 1 - int(base); seen = own < seen ? own : seen; }
      if (p.window) {
        hidden = position - int(p.window) + 1 - int(base);
        if (!p.causal) { Ints own = position + int(p.window) - int(base); seen = own < seen ? own : seen; }
      }
      for (int t = 0; t < width; t++) store(of + t * LANES, (t < seen) & (t >= hidden) ? load(of + t * LANES) : all(-INFINITY));
    }
    Floats tops[CHAINS];
    for (int j = 0; j < CHAINS; j++) tops[j] = all(-INFINITY), sums[j] = Floats{};
    for (int t = 0; t < width; t += CHAINS)
      for (int j = 0; j < CHAINS; j++) tops[j] = larger(load(scores + (t + j) * LANES), tops[j]);
    Floats top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])) * scale;
    Floats before = load(most), now = top > before + LAG ? top : before;
    Ints none = now == -INFINITY;
    shift = none ? Floats{} : now;
    keep = none ? all(1.0f) : power(before - shift);
    store(most, now);
  }
  // Weighs the next positions, `fours` times four of them.
  void go_on(int fours) {
    const __m512i side_by_side = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int end = std::min(width, done + fours * CHAINS); done < end; done += CHAINS)
      for (int j = 0; j < CHAINS; j += 2) {
        const float* at = scores + (done + j) * LANES;
        Floats even = power(load(at) * scale - shift), odd = power(load(at + LANES) * scale - shift);
        sums[j] += even;
        sums[j + 1] += odd;
        if constexpr (TERMS) put_pair_terms(even, odd, (uint32_t*)weights + (done + j) / 2 * LANES, POSITIONS / 2 * LANES);
        else {
          __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
          _mm512_storeu_si512(weights + (done + j) * LANES, _mm512_permutexvar_epi16(side_by_side, both));
        }
      }
  }
  // Weighs those that are left, and adds all to the totals.
  void end(float* total) {
    go_on(POSITIONS / CHAINS);
    store(total, total_of(load(total), keep, sums[0] + sums[1], sums[2] + sums[3]));
  }
};
// out[r][16] (+)= sum over pairs of a[r][2 i], a[r][2 i + 1] by b[i][16][2], of ROWS rows that lie `step` bytes apart.
template <int ROWS> static inline void sum_pairs(const bf16* a, long step, const void* b, long count, bool add, float* out) {
  __m512 sums[ROWS];
  for (int r = 0; r < ROWS; r++) sums[r] = add ? _mm512_loadu_ps(out + r * LANES) : _mm512_setzero_ps();
  for (long i = 0; i < count; i += 2) {
    __m512bh lanes = (__m512bh)_mm512_loadu_si512((const uint32_t*)b + i / 2 * LANES);
    for (int r = 0; r < ROWS; r++) sums[r] = _mm512_dpbf16_ps(sums[r], pair_at((const bf16*)((const char*)a + r * step) + i), lanes);
  }
  for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(out + r * LANES, sums[r]);
}
static inline void score_pairs(const Tiles& keys, const uint32_t* turned, long dim, long width, float* scores, NextKV& next) {
  for (long t = 0; t < width / 16; t++) {
    next.fetch<true>(LANES);
    sum_pairs<16>(keys.tile[t], keys.step[t], turned, dim, false, scores + t * 256);
  }
}
static inline void value_pairs(const bf16* value, const bf16* weights, long dim, long width, float* out, NextKV& next) {
  for (long c = 0; c < dim; c += 16) {
    next.fetch<true>(LANES);
    sum_pairs<16>(value + c * POSITIONS, POSITIONS * 2, weights, width, true, out + c * LANES);
  }
}
#if defined(__AMX_BF16__)
// Scores of 16 queries, turned over, by 32 or 64 keys: `[width][16]`.
static inline void score_tiles(const Tiles& keys, const uint32_t* turned, long dim, long width, float* scores) {
  _tile_zero(0); _tile_zero(1);
  if (width > DEEP) { _tile_zero(2); _tile_zero(3); }
  for (long c = 0; c < dim; c += DEEP) {
    _tile_loadd(6, turned + c / 2 * LANES, 64);
    _tile_loadd(4, keys.tile[0] + c, keys.step[0]); _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, keys.tile[1] + c, keys.step[1]); _tile_dpbf16ps(1, 5, 6);
    if (width <= DEEP) continue;
    _tile_loadd(4, keys.tile[2] + c, keys.step[2]); _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, keys.tile[3] + c, keys.step[3]); _tile_dpbf16ps(3, 5, 6);
  }
  _tile_stored(0, scores, 64); _tile_stored(1, scores + 256, 64);
  if (width > DEEP) { _tile_stored(2, scores + 512, 64); _tile_stored(3, scores + 768, 64); }
}
// Adds values by the weights of 16 queries to their outputs, `[dim][16]`.
static inline void value_tiles(const bf16* value, const bf16* weights, long dim, long width, float* out) {
  _tile_loadd(6, weights, 64);
  if (width > DEEP) _tile_loadd(7, weights + POSITIONS * LANES / 2, 64);
  for (long c = 0; c < dim; c += 2 * LANES) {
    const bf16 *upper = value + c * POSITIONS, *lower = upper + LANES * POSITIONS;
    _tile_loadd(0, out + c * LANES, 64); _tile_loadd(1, out + (c + 16) * LANES, 64);
    _tile_loadd(4, upper, POSITIONS * 2); _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, lower, POSITIONS * 2); _tile_dpbf16ps(1, 5, 6);
    if (width > DEEP) {
      _tile_loadd(2, upper + DEEP, POSITIONS * 2); _tile_dpbf16ps(0, 2, 7);
      _tile_loadd(3, lower + DEEP, POSITIONS * 2); _tile_dpbf16ps(1, 3, 7);
    }
    _tile_stored(0, out + c * LANES, 64); _tile_stored(1, out + (c + 16) * LANES, 64);
  }
}
// What of two numbers' terms is multiplied: all but what is below the last bit of the largest product, the smallest first. The third is the
// tile that the second one's term may lie in.
#define EACH_PRODUCT_OF_TERMS(of) of(2, 0, 5) of(1, 1, 6) of(0, 2, 7) of(1, 0, 5) of(0, 1, 6) of(0, 0, 5)
// As `score_tiles`, of terms: key `[3][POSITIONS][dim]`, turned `[3][dim / 2][16]`. Tiles are loaded anew for each product, which takes less
// time than the product. Meanwhile the core's other units weigh the scores of the queries before: `fours` after each product.
static inline void score_term_tiles(const bf16* key, const uint32_t* turned, long dim, long width, float* scores, Softmax<true>& before, int fours) {
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (long c = 0; c < dim; c += DEEP) {
    const bf16* at = key + c;
    const uint32_t* query = turned + c / 2 * LANES;
    _tile_loadd(5, query, 64); _tile_loadd(6, query + dim / 2 * LANES, 64); _tile_loadd(7, query + dim * LANES, 64);
#define OF_TERMS(i, j, tile) \
    _tile_loadd(4, at + i * POSITIONS * dim, dim * 2); _tile_dpbf16ps(0, 4, tile); \
    _tile_loadd(4, at + (i * POSITIONS + 16) * dim, dim * 2); _tile_dpbf16ps(1, 4, tile); \
    if (width > DEEP) { \
      _tile_loadd(4, at + (i * POSITIONS + 32) * dim, dim * 2); _tile_dpbf16ps(2, 4, tile); \
      _tile_loadd(4, at + (i * POSITIONS + 48) * dim, dim * 2); _tile_dpbf16ps(3, 4, tile); \
    } \
    before.go_on(fours);
    EACH_PRODUCT_OF_TERMS(OF_TERMS)
#undef OF_TERMS
  }
  _tile_stored(0, scores, 64); _tile_stored(1, scores + 256, 64);
  if (width > DEEP) { _tile_stored(2, scores + 512, 64); _tile_stored(3, scores + 768, 64); }
}
// As `value_tiles`, of terms: value `[3][dim][POSITIONS]`, weights `[3][POSITIONS / 2][16][2]`. The two halves of the positions have sums of
// their own, since a product waits for the one before it that adds to the same tile.
static inline void value_term_tiles(const bf16* value, const bf16* weights, long dim, long width, float* out) {
  alignas(64) float half[2 * 256];
  for (long c = 0; c < dim; c += 2 * LANES) {
    const bf16* at = value + c * POSITIONS;
    _tile_loadd(0, out + c * LANES, 64); _tile_loadd(1, out + (c + 16) * LANES, 64);
    _tile_zero(2); _tile_zero(3);
#define OF_TERMS(i, j, tile) \
    _tile_loadd(6, weights + j * POSITIONS * LANES, 64); \
    _tile_loadd(4, at + i * dim * POSITIONS, POSITIONS * 2); _tile_dpbf16ps(0, 4, 6); \
    _tile_loadd(5, at + (i * dim + 16) * POSITIONS, POSITIONS * 2); _tile_dpbf16ps(1, 5, 6); \
    if (width > DEEP) { \
      _tile_loadd(7, weights + j * POSITIONS * LANES + POSITIONS * LANES / 2, 64); \
      _tile_loadd(4, at + i * dim * POSITIONS + DEEP, POSITIONS * 2); _tile_dpbf16ps(2, 4, 7); \
      _tile_loadd(5, at + (i * dim + 16) * POSITIONS + DEEP, POSITIONS * 2); _tile_dpbf16ps(3, 5, 7); \
    }
    EACH_PRODUCT_OF_TERMS(OF_TERMS)
#undef OF_TERMS
    _tile_stored(0, out + c * LANES, 64); _tile_stored(1, out + (c + 16) * LANES, 64);
    if (width <= DEEP) continue;
    _tile_stored(2, half, 64); _tile_stored(3, half + 256, 64);
    for (long i = 0; i < 2 * 256; i += LANES) store(out + c * LANES + i, load(out + c * LANES + i) + load(half + i));
  }
}
#else
static void score_tiles(const Tiles&, const uint32_t*, long, long, float*) {}
static void value_tiles(const bf16*, const bf16*, long, long, float*) {}
static void score_term_tiles(const bf16*, const uint32_t*, long, long, float*, Softmax<true>&, int) {}
static void value_term_tiles(const bf16*, const bf16*, long, long, float*) {}
#endif
// Queries [first, last) of a row and of heads [head, last_head) of KV, as `attend_piece`: scores are keys by queries, outputs
// values by weights, so that a lane is a query. All heads read some positions before they read the next, which lie beside them.
template <class KV> static void attend_tiles(const Attention& p, const Piece& piece, const Piece* after) {
  long row = piece.row, head = piece.head, last_head = piece.last_head, first = piece.first, last = piece.last;
  auto [begin, end] = seen_by(p, piece);
  long group = p.heads / p.kv_heads, dim = rounded_up(p.dim, DEEP), queries = (last - first) * group, lots = (queries + LANES - 1) / LANES;
  long of_head = lots * (LANES * dim * 3 / 2 + 3 * LANES);       // what a head keeps
  float* memory = scratch(POSITIONS * dim * 2 + POSITIONS * LANES * 3 / 2 + (last_head - head) * of_head);
  bf16 *key = (bf16*)memory, *value = key + POSITIONS * dim;
  uint32_t* pairs = (uint32_t*)(value + POSITIONS * dim);
  float* scores = (float*)(pairs + POSITIONS * dim);             // [POSITIONS][16]
  bf16* weights = (bf16*)(scores + POSITIONS * LANES);
  struct Kept { uint32_t* query; float *output, *most, *total; int32_t* position; };
  auto kept_of = [&](long of) {
    Kept k;
    k.query = (uint32_t*)(scores + POSITIONS * LANES * 3 / 2 + (of - head) * of_head);  // [lots][dim / 2][16]
    k.output = (float*)(k.query + lots * LANES * dim / 2);       // [lots][dim][16]
    k.most = k.output + lots * LANES * dim;
    k.total = k.most + lots * LANES;
    k.position = (int32_t*)(k.total + lots * LANES);
    return k;
  };
  long token = p.first_token[row] + first, start = p.seq_lens[row] - p.query_lens[row] + first;
  for (long of = head; of < last_head; of++) {
    Kept k = kept_of(of);
    for (long lot = 0; lot < lots; lot++) {
      uint32_t* rows = (uint32_t*)k.output;  // as they are, then turned over
      for (long i = 0; i < LANES; i++) {
        long q = std::min(lot * LANES + i, queries - 1);
        const bf16* from = (const bf16*)p.query + ((token + q / group) * p.heads + of * group + q % group) * p.dim;
        read_head(from, nullptr, p.dim, dim, (bf16*)(rows + i * dim / 2));
        k.position[lot * LANES + i] = int32_t(start + q / group);
        k.most[lot * LANES + i] = p.sinks ? to_float(((const bf16*)p.sinks)[of * group + q % group]) * LOG2_E : -INFINITY;
        k.total[lot * LANES + i] = p.sinks ? 1.0f : 0.0f;
      }
      for (long c = 0; c < dim / 2; c += 16) turn_words(rows + c, dim / 2, k.query + (lot * dim / 2 + c) * LANES, LANES);
    }
    std::memset(k.output, 0, lots * LANES * dim * sizeof(float));
  }
  if (has_tiles) set_tiles(16, 16);
  const int32_t* table = p.tables + row * p.table_step;
  for (long base = begin / POSITIONS * POSITIONS; base < end; base += POSITIONS) {
    long count = std::min<long>(POSITIONS, end - base), width = rounded_up(count, DEEP);
    bool all_seen = sees_all(p, start, start + (last - first) - 1, base, count);
    NextKV next;
    if (!has_tiles && queries <= TOGETHER) next = next_of<KV>(p, piece, after, base);
    for (long of = head; of < last_head; of++) {
      Kept k = kept_of(of);
      if (has_tiles) next = next_kv<KV>(p, table, base + POSITIONS, end, of, of + 1);
      Tiles keys = read_kv<KV>(p, table, begin, base, count, of, dim, key, pairs, next);
      turn_values(pairs, width, dim, value);
      for (long lot = 0; lot < lots; lot++) {
        const uint32_t* query = k.query + lot * dim / 2 * LANES;
        if (has_tiles) score_tiles(keys, query, dim, width, scores); else score_pairs(keys, query, dim, width, scores, next);
        float* out = k.output + lot * LANES * dim;
        Ints at = vector_at<Ints>(k.position + lot * LANES);
        Softmax<false> softmax;
        softmax.begin(p, scores, base, count, int(width), at, all_seen, k.most + lot * LANES, weights);
        softmax.end(k.total + lot * LANES);
        Ints changed = softmax.keep != 1.0f;
        if (any(changed)) for (long c = 0; c < dim; c++) store(out + c * LANES, load(out + c * LANES) * softmax.keep);
        if (has_tiles) value_tiles(value, weights, dim, width, out); else value_pairs(value, weights, dim, width, out, next);
      }
    }
  }
  if (has_tiles) free_tiles();
  for (long of = head; of < last_head; of++)
    for (long lot = 0; lot < lots; lot++) {
      Kept k = kept_of(of);
      float* out = k.output + lot * LANES * dim;
      Floats sums = load(k.total + lot * LANES), inverse = sums > 0.0f ? 1.0f / sums : Floats{};
      for (long c = 0; c < dim; c++) store(out + c * LANES, load(out + c * LANES) * inverse);
      for (long c = 0; c < p.dim; c += 16) {
        float turned[LANES * LANES];
        turn_words((const uint32_t*)(out + c * LANES), LANES, (uint32_t*)turned, LANES);
        for (long q = lot * LANES; q < std::min(queries, (lot + 1) * LANES); q++)
          store((bf16*)p.out + ((token + q / group) * p.heads + of * group + q % group) * p.dim + c, load(turned + q % LANES * LANES));
      }
    }
}
// Numbers of a head in float32 as terms, `apart` from one another, and zeros up to `deep`.
template <class KV> static inline void read_terms(const KV* from, float scale, long dim, long deep, bf16* to, long apart) {
  for (long c = 0; c < deep; c += LANES) {
    Floats x = c < dim ? load(from + c) * scale : Floats{};
    for (int i = 0; i < NUM_TERMS; i++) {
      __m512i upper = _mm512_srli_epi32((__m512i)x, 16);
      _mm256_storeu_si256((__m256i*)(to + i * apart + c), _mm512_cvtepi32_epi16(upper));
      x -= (Floats)_mm512_slli_epi32(upper, 16);
    }
  }
}
// As `read_kv`: keys as terms, `[3][POSITIONS][deep]`, values as `[3][deep][POSITIONS]`. plain: `[POSITIONS][deep]`, pairs `[3][POSITIONS / 2][deep]`.
template <class KV>
static void read_kv_terms(const Attention& p, const int32_t* table, long begin, long base, long count, long head, long deep, bf16* key, bf16* value,
                          float* plain, uint32_t* pairs) {
  const KV* cache = (const KV*)p.cache;
  long width = rounded_up(count, DEEP), unseen = std::min(std::max<long>(0, begin - base), count);
  auto clear = [&](long first, long last) {
    for (int i = 0; i < NUM_TERMS; i++) std::memset((void*)(key + (i * POSITIONS + first) * deep), 0, (last - first) * deep * sizeof(bf16));
    std::memset((void*)(plain + first * deep), 0, (last - first) * deep * sizeof(float));
  };
  clear(0, unseen);
  clear(count, width);
  each_key(p, table, base + unseen, count - unseen, head, [&](long r, long at) {
    long t = unseen + r;
    float of_key = p.scales ? p.scales[at] : 1.0f, of_value = p.scales ? p.scales[at + p.kv_heads] : 1.0f;
    read_terms(cache + at * p.dim, of_key, p.dim, deep, key + t * deep, POSITIONS * deep);
    const KV* values = cache + (at + p.kv_heads) * p.dim;
    for (long c = 0; c < deep; c += LANES) store(plain + t * deep + c, c < p.dim ? load(values + c) * of_value : Floats{});
  });
  for (long t = 0; t < width; t += 2)
    for (long c = 0; c < deep; c += LANES) put_pair_terms(load(plain + t * deep + c), load(plain + (t + 1) * deep + c), pairs + t / 2 * deep + c, POSITIONS / 2 * deep);
  for (int i = 0; i < NUM_TERMS; i++) turn_values(pairs + i * (POSITIONS / 2) * deep, width, deep, value + i * deep * POSITIONS);
}
// As `attend_tiles`, in float32: queries, keys, weights and values are sums of three terms of bfloat16, and products of terms are exact.
template <class KV> static void attend_terms(const Attention& p, const Piece& piece) {
  long row = piece.row, head = piece.head, first = piece.first, last = piece.last;
  auto [begin, end] = seen_by(p, piece);
  long group = p.heads / p.kv_heads, dim = rounded_up(p.dim, DEEP), queries = (last - first) * group, lots = (queries + LANES - 1) / LANES;
  constexpr long OF_WEIGHTS = NUM_TERMS * POSITIONS * LANES;
  long numbers = POSITIONS * dim, of_lot = LANES * dim * 5 / 2 + 4 * LANES;  // query, output, maxima, totals, positions, what is kept
  float* memory = scratch(numbers * (NUM_TERMS * 3 / 2 + 2) + 2 * POSITIONS * LANES + lots * (OF_WEIGHTS / 2 + of_lot));
  int fours = int((POSITIONS / 4 + dim / DEEP * 6 - 1) / (dim / DEEP * 6));  // of the scores before, after each of the six products of DEEP numbers
  bf16 *key = (bf16*)memory, *value = key + NUM_TERMS * numbers;
  uint32_t* pairs = (uint32_t*)(value + NUM_TERMS * numbers);
  float *plain = (float*)(pairs + NUM_TERMS * numbers / 2), *scores = plain + numbers;
  bf16* weights = (bf16*)(scores + 2 * POSITIONS * LANES);
  float* kept = (float*)(weights + lots * OF_WEIGHTS);
  struct Lot { uint32_t* query; float *output, *most, *total; int32_t* position; float* keep; };
  auto lot_at = [&](long i) {
    float* at = kept + i * of_lot;
    return Lot{(uint32_t*)at, at + LANES * dim * 3 / 2, at + LANES * dim * 5 / 2, at + LANES * dim * 5 / 2 + LANES, (int32_t*)(at + LANES * dim * 5 / 2 + 2 * LANES),
               at + LANES * dim * 5 / 2 + 3 * LANES};
  };
  long token = p.first_token[row] + first, start = p.seq_lens[row] - p.query_lens[row] + first;
  for (long i = 0; i < lots; i++) {
    Lot lot = lot_at(i);
    bf16* rows = key;  // as they are, `[3][16][dim]`, then turned over
    for (long j = 0; j < LANES; j++) {
      long q = std::min(i * LANES + j, queries - 1);
      read_terms((const float*)p.query + ((token + q / group) * p.heads + head * group + q % group) * p.dim, 1.0f, p.dim, dim, rows + j * dim, LANES * dim);
      lot.position[j] = int32_t(start + q / group);
      lot.most[j] = p.sinks ? ((const float*)p.sinks)[head * group + q % group] : -INFINITY;
      lot.total[j] = p.sinks ? 1.0f : 0.0f;
    }
    for (int term = 0; term < NUM_TERMS; term++)
      for (long c = 0; c < dim / 2; c += 16) turn_words((uint32_t*)(rows + term * LANES * dim) + c, dim / 2, lot.query + (term * dim / 2 + c) * LANES, LANES);
    std::memset(lot.output, 0, LANES * dim * sizeof(float));
  }
  set_tiles(16, 16);
  const int32_t* table = p.tables + row * p.table_step;
  for (long base = begin / POSITIONS * POSITIONS; base < end; base += POSITIONS) {
    long count = std::min<long>(POSITIONS, end - base), width = rounded_up(count, DEEP);
    bool all_seen = sees_all(p, start, start + (last - first) - 1, base, count);
    read_kv_terms<KV>(p, table, begin, base, count, head, dim, key, value, plain, pairs);
    // Those before see none of it. Keys stay in the first cache for all that do, and then values.
    long from = p.causal ? std::max<long>(0, (base - start) * group / LANES) : 0;
    Softmax<true> softmax;
    for (long i = from; i < lots; i++) {
      Lot lot = lot_at(i);
      float* now = scores + i % 2 * POSITIONS * LANES;
      score_term_tiles(key, lot.query, dim, width, now, softmax, fours);
      if (i > from) softmax.end(lot_at(i - 1).total);
      softmax.begin(p, now, base, count, int(width), vector_at<Ints>(lot.position), all_seen, lot.most, weights + i * OF_WEIGHTS);
      store(lot.keep, softmax.keep);
    }
    if (from < lots) softmax.end(lot_at(lots - 1).total);
    for (long i = from; i < lots; i++) {
      Lot lot = lot_at(i);
      Floats keep = load(lot.keep);
      Ints changed = keep != 1.0f;
      if (any(changed)) for (long c = 0; c < dim; c++) store(lot.output + c * LANES, load(lot.output + c * LANES) * keep);
      value_term_tiles(value, weights + i * OF_WEIGHTS, dim, width, lot.output);
    }
  }
  free_tiles();
  for (long i = 0; i < lots; i++) {
    Lot lot = lot_at(i);
    Floats sums = load(lot.total), inverse = sums > 0.0f ? 1.0f / sums : Floats{};
    for (long c = 0; c < dim; c++) store(lot.output + c * LANES, load(lot.output + c * LANES) * inverse);
    for (long c = 0; c < p.dim; c += 16) {
      float turned[LANES * LANES];
      turn_words((const uint32_t*)(lot.output + c * LANES), LANES, (uint32_t*)turned, LANES);
      for (long q = i * LANES; q < std::min(queries, (i + 1) * LANES); q++)
        store((float*)p.out + ((token + q / group) * p.heads + head * group + q % group) * p.dim + c, load(turned + q % LANES * LANES));
    }
  }
}
// Scores of ROWS queries, as they are, by keys that are turned over: `[ROWS][POSITIONS]`, with the sums of `score_pairs`.
template <int ROWS> static inline void few_score_rows(const uint32_t* turned, const bf16* query, long dim, float* scores) {
  __m512 sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < VECTORS; j++) sums[r][j] = _mm512_setzero_ps();
  for (long i = 0; i < dim / 2; i++) {
    __m512bh column[VECTORS];
    for (int j = 0; j < VECTORS; j++) column[j] = (__m512bh)_mm512_loadu_si512(turned + i * POSITIONS + j * LANES);
    for (int r = 0; r < ROWS; r++) {
      __m512bh pair = pair_at(query + r * dim + 2 * i);
      for (int j = 0; j < VECTORS; j++) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], column[j], pair);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < VECTORS; j++) _mm512_storeu_ps(scores + r * POSITIONS + j * LANES, sums[r][j]);
}
// turned: memory for `[dim / 2][POSITIONS]`. queries: `[queries][dim]`.
static inline void few_score_pairs(const Tiles& keys, const bf16* query, long queries, long dim, long width, uint32_t* turned, float* scores, NextKV& next) {
  for (long t = 0; t < width; t += LANES)
    for (long c = 0; c < dim / 2; c += LANES) {
      next.fetch<true>(LANES);
      turn_words((const uint32_t*)((const char*)keys.tile[t / 16]) + c, keys.step[t / 16] / 4, turned + c * POSITIONS + t, POSITIONS);
    }
  for (long q = 0; q < queries; q += 3) {
    if (queries - q >= 3) few_score_rows<3>(turned, query + q * dim, dim, scores + q * POSITIONS);
    else if (queries - q == 2) few_score_rows<2>(turned, query + q * dim, dim, scores + q * POSITIONS);
    else few_score_rows<1>(turned, query + q * dim, dim, scores + q * POSITIONS);
  }
}
constexpr int FOURS = 4;
// What `attend_few` keeps of four queries of a head: a lane is `4 * (position % 4) + query`, so maxima and totals are there four times.
struct Four { Floats most, total; Ints position; };
// As `Softmax`, of four queries, with every sum in the same order. scores: `[POSITIONS][LANES]` with tiles, else `[4][POSITIONS]`. weights: `[4][POSITIONS]`.
static inline Floats weigh_four(const Attention& p, const float* scores, long base, long count, int width, bool all_seen, Four& four, bf16* weights, NextKV& next) {
  const Ints lane = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  const __m512i by_position = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  float scale = p.scale * LOG2_E;
  Ints seen = Ints{} + int(count), hidden{};
  if (!all_seen) {
    if (p.causal) { Ints own = four.position + 1 - int(base); seen = own < seen ? own : seen; }
    if (p.window) {
      hidden = four.position - int(p.window) + 1 - int(base);
      if (!p.causal) { Ints own = four.position + int(p.window) - int(base); seen = own < seen ? own : seen; }
    }
  }
  Floats x[POSITIONS / FOURS], top = all(-INFINITY);
  for (int i = 0; i < width / FOURS; i++) {
    const float* at = scores + i * (has_tiles ? FOURS * LANES : FOURS);
    const long step = has_tiles ? LANES : POSITIONS;  // rows of positions, or of queries
    __m512 rows = _mm512_castps128_ps512(_mm_loadu_ps(at));
    rows = _mm512_insertf32x4(rows, _mm_loadu_ps(at + step), 1);
    rows = _mm512_insertf32x4(rows, _mm_loadu_ps(at + 2 * step), 2);
    rows = _mm512_insertf32x4(rows, _mm_loadu_ps(at + 3 * step), 3);
    x[i] = (Floats)(has_tiles ? rows : _mm512_permutexvar_ps(by_position, rows));
    if (!all_seen) { Ints t = lane + i * FOURS; x[i] = (t < seen) & (t >= hidden) ? x[i] : all(-INFINITY); }
    top = larger(x[i], top);
  }
  top = larger(top, (Floats)_mm512_shuffle_f32x4((__m512)top, (__m512)top, 0xb1));
  top = larger(top, (Floats)_mm512_shuffle_f32x4((__m512)top, (__m512)top, 0x4e)) * scale;
  Floats before = four.most, now = top > before + LAG ? top : before;
  Ints none = now == -INFINITY;
  Floats shift = none ? Floats{} : now, sums{};
  const __m512i by_query = _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2, 29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
  for (int i = 0; i < width / FOURS; i += 2) {
    next.fetch<FAR_NEXT>(p.dim / 8);
    Floats first = power_of_two(x[i] * scale - shift), second = power_of_two(x[i + 1] * scale - shift);
    sums += first;
    sums += second;
    __m512i both = _mm512_permutexvar_epi16(by_query, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    bf16* to = weights + i * FOURS;
    _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(both));
    _mm_storeu_si128((__m128i*)(to + POSITIONS), _mm512_extracti32x4_epi32(both, 1));
    _mm_storeu_si128((__m128i*)(to + 2 * POSITIONS), _mm512_extracti32x4_epi32(both, 2));
    _mm_storeu_si128((__m128i*)(to + 3 * POSITIONS), _mm512_extracti32x4_epi32(both, 3));
  }
  Floats keep = none ? all(1.0f) : power_of_two(before - shift);
  sums += (Floats)_mm512_shuffle_f32x4((__m512)sums, (__m512)sums, 0xb1);
  __m512 left = _mm512_shuffle_f32x4((__m512)sums, (__m512)sums, 0x00), right = _mm512_shuffle_f32x4((__m512)sums, (__m512)sums, 0xaa);
  four.total = total_of(four.total, keep, (Floats)left, (Floats)right);
  four.most = now;
  return keep;
}
// Adds values, as pairs, by the weights `[queries][POSITIONS]` of a multiple of four queries, to `out` `[queries][dim]`.
static inline void few_value_pairs(const uint32_t* pairs, const bf16* weights, long queries, long dim, long width, float* out) {
  for (long q = 0; q < queries; q += FOURS)
    for (long c = 0; c < dim; c += 2 * LANES) {
      __m512 sums[FOURS][2];
      for (int r = 0; r < FOURS; r++)
        for (int j = 0; j < 2; j++) sums[r][j] = _mm512_loadu_ps(out + (q + r) * dim + c + j * LANES);
      for (long i = 0; i < width / 2; i++) {
        __m512bh left = (__m512bh)_mm512_loadu_si512(pairs + i * dim + c), right = (__m512bh)_mm512_loadu_si512(pairs + i * dim + c + LANES);
        for (int r = 0; r < FOURS; r++) {
          __m512bh weight = pair_at(weights + (q + r) * POSITIONS + 2 * i);
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], left, weight);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], right, weight);
        }
      }
      for (int r = 0; r < FOURS; r++)
        for (int j = 0; j < 2; j++) _mm512_storeu_ps(out + (q + r) * dim + c + j * LANES, sums[r][j]);
    }
}
#if defined(__AMX_BF16__)
// Tiles 0 and 1: scores; 2 and 3: keys, or values; 4: queries; 5 and 6: outputs, 7: weights, each of `queries` rows.
static void set_few_tiles(long queries) {
  TileConfig c;
  for (int t = 0; t < 8; t++) c.rows[t] = uint8_t(t < 5 ? 16 : queries), c.bytes[t] = 64;
  load_config(c);
}
static inline void few_score_tiles(const Tiles& keys, const uint32_t* turned, long dim, long width, float* scores, NextKV& next) {
  for (long t = 0; t < width / 16; t += 2, scores += 512) {
    _tile_zero(0); _tile_zero(1);
    for (long c = 0; c < dim; c += DEEP) {
      next.fetch<false>(16);
      _tile_loadd(4, turned + c / 2 * LANES, 64);
      _tile_loadd(2, keys.tile[t] + c, keys.step[t]); _tile_dpbf16ps(0, 2, 4);
      _tile_loadd(3, keys.tile[t + 1] + c, keys.step[t + 1]); _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, scores, 64); _tile_stored(1, scores + 256, 64);
  }
}
// As `few_value_pairs`, by tiles that `set_few_tiles` has set for as many queries.
static inline void few_value_tiles(const uint32_t* pairs, const bf16* weights, long dim, long width, float* out, NextKV& next) {
  for (long c = 0; c < dim; c += 2 * LANES) {
    _tile_loadd(5, out + c, dim * 4); _tile_loadd(6, out + c + LANES, dim * 4);
    for (long t = 0; t < width; t += DEEP) {
      next.fetch<false>(16);
      _tile_loadd(7, weights + t, POSITIONS * 2);
      _tile_loadd(2, pairs + t / 2 * dim + c, dim * 4); _tile_dpbf16ps(5, 7, 2);
      _tile_loadd(3, pairs + t / 2 * dim + c + LANES, dim * 4); _tile_dpbf16ps(6, 7, 3);
    }
    _tile_stored(5, out + c, dim * 4); _tile_stored(6, out + c + LANES, dim * 4);
  }
}
#else
static void set_few_tiles(long) {}
static void few_score_tiles(const Tiles&, const uint32_t*, long, long, float*, NextKV&) {}
static void few_value_tiles(const uint32_t*, const bf16*, long, long, float*, NextKV&) {}
#endif
// As `attend_tiles`, with the same bits, of at most FEW queries of a head: four of them are weighed at once, and outputs are weights by
// values, which need not be turned over.
template <class KV> static void attend_few(const Attention& p, const Piece& piece, const Piece* after) {
  long row = piece.row, head = piece.head, last_head = piece.last_head, first = piece.first, last = piece.last;
  auto [begin, end] = seen_by(p, piece);
  long group = p.heads / p.kv_heads, dim = rounded_up(p.dim, DEEP), queries = (last - first) * group, rows = rounded_up(queries, FOURS);
  long of_head = FEW * dim / 2 + rows * dim;  // queries, turned over, and outputs
  float* memory = scratch(POSITIONS * dim * 5 / 2 + POSITIONS * LANES * 3 / 2 + (last_head - head) * of_head);
  bf16* key = (bf16*)memory;
  uint32_t* pairs = (uint32_t*)(key + POSITIONS * dim);
  float* scores = (float*)(pairs + POSITIONS * dim);
  bf16* weights = (bf16*)(scores + POSITIONS * LANES);
  float* kept = scores + POSITIONS * LANES * 3 / 2;
  uint32_t* turned = (uint32_t*)(kept + (last_head - head) * of_head);  // keys, where there are no tiles
  if (!has_tiles) std::memset(scores + queries * POSITIONS, 0, (rows - queries) * POSITIONS * sizeof(float));
  std::vector<Four> fours((last_head - head) * rows / FOURS);
  long token = p.first_token[row] + first, start = p.seq_lens[row] - p.query_lens[row] + first;
  for (long of = head; of < last_head; of++) {
    float *query = kept + (of - head) * of_head, *output = query + FEW * dim / 2;
    uint32_t* plain = has_tiles ? pairs : (uint32_t*)query;
    for (long q = 0; q < FEW; q++) {
      if (q >= queries) { std::memset(plain + q * dim / 2, 0, dim * 2); continue; }
      const bf16* from = (const bf16*)p.query + ((token + q / group) * p.heads + of * group + q % group) * p.dim;
      read_head(from, nullptr, p.dim, dim, (bf16*)(plain + q * dim / 2));
    }
    for (long c = 0; has_tiles && c < dim / 2; c += 16) turn_words(plain + c, dim / 2, (uint32_t*)query + c * LANES, LANES);
    std::memset(output, 0, rows * dim * sizeof(float));
    for (long q = 0; q < rows; q++) {
      Four& four = fours[((of - head) * rows + q) / FOURS];
      long real = std::min(q, queries - 1);
      for (int lane = int(q % FOURS); lane < LANES; lane += FOURS) {
        four.position[lane] = int32_t(start + real / group);
        four.most[lane] = p.sinks ? to_float(((const bf16*)p.sinks)[of * group + real % group]) * LOG2_E : -INFINITY;
        four.total[lane] = p.sinks ? 1.0f : 0.0f;
      }
    }
  }
  if (has_tiles) set_few_tiles(rows);
  const int32_t* table = p.tables + row * p.table_step;
  for (long base = begin / POSITIONS * POSITIONS; base < end; base += POSITIONS) {
    long count = std::min<long>(POSITIONS, end - base), width = rounded_up(count, DEEP);
    bool all_seen = sees_all(p, start, start + (last - first) - 1, base, count);
    NextKV next;
    if (!has_tiles) next = next_of<KV>(p, piece, after, base);
    for (long of = head; of < last_head; of++) {
      float *query = kept + (of - head) * of_head, *output = query + FEW * dim / 2;
      bool is_last = of + 1 == last_head;
      long coming = is_last ? head : of + 1;
      if (has_tiles) next = next_kv<KV>(p, table, is_last ? base + POSITIONS : base, end, coming, coming + 1);
      Tiles keys = read_kv<KV>(p, table, begin, base, count, of, dim, key, pairs, next);
      if (has_tiles) few_score_tiles(keys, (uint32_t*)query, dim, width, scores, next); else few_score_pairs(keys, (const bf16*)query, queries, dim, width, turned, scores, next);
      for (long q = 0; q < rows; q += FOURS) {
        Four& four = fours[((of - head) * rows + q) / FOURS];
        Floats keep = weigh_four(p, scores + q * (has_tiles ? 1 : POSITIONS), base, count, int(width), all_seen, four, weights + q * POSITIONS, next);
        Ints changed = keep != 1.0f;
        if (any(changed))
          for (long r = 0; r < FOURS; r++)
            for (long c = 0; c < dim; c += LANES) store(output + (q + r) * dim + c, load(output + (q + r) * dim + c) * keep[r]);
      }
      if (has_tiles) few_value_tiles(pairs, weights, dim, width, output, next); else few_value_pairs(pairs, weights, rows, dim, width, output);
    }
  }
  if (has_tiles) free_tiles();
  for (long of = head; of < last_head; of++) {
    float* output = kept + (of - head) * of_head + FEW * dim / 2;
    for (long q = 0; q < queries; q++) {
      float sum = fours[((of - head) * rows + q) / FOURS].total[q % FOURS], inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
      bf16* to = (bf16*)p.out + ((token + q / group) * p.heads + of * group + q % group) * p.dim;
      for (long c = 0; c < p.dim; c += LANES) store(to + c, load(output + q * dim + c) * inverse);
    }
  }
}
#else
template <class KV> static void attend_tiles(const Attention&, const Piece&, const Piece*) {}
template <class KV> static void attend_few(const Attention&, const Piece&, const Piece*) {}
template <class KV> static void attend_terms(const Attention&, const Piece&) {}
#endif
template <class T, class KV> static void attend(const Attention& p, int threads) {
  bool by_tiles = HAS_PAIRS && std::is_same<T, bf16>::value;
  long group = p.heads / p.kv_heads;
  auto by_terms = [&](long row) { return HAS_PAIRS && has_tiles && std::is_same<T, float>::value && p.query_lens[row] > ALIKE; };
  std::vector<Piece> pieces;
  for (long row = 0; row < p.rows; row++) {
    // Rows of few queries read memory, so a thread takes all of their heads, where there are rows for all threads; those that are left
    // over when all threads have had as many are shared by heads.
    long heads = row < p.rows / std::max(1, threads) * threads && p.query_lens[row] * group <= TOGETHER ? p.kv_heads : 1;
    long at_once = by_tiles ? TILE_QUERIES : by_terms(row) ? TERM_QUERIES : QUERY_ROWS, most = std::max<long>(1, at_once / group);
    long seen = p.window ? std::min<long>(p.seq_lens[row], p.window + p.query_lens[row]) : p.seq_lens[row];
    for (long head = 0; head < p.kv_heads; head += heads)
      for (long first = 0; first < p.query_lens[row]; first += most) {
        long last = std::min(first + most, p.query_lens[row]);
        pieces.push_back({int(row), int(head), int(head + heads), int(first), int(last), heads * seen * (last - first)});
      }
  }
  // The longest first, so that no thread begins one when the others have nothing left.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& one, const Piece& other) { return one.work > other.work; });
  share(threads, long(pieces.size()), 1, [&](long from, long to) {
    for (long i = from; i < to; i++) {
      const Piece &piece = pieces[i], *after = i + 1 < to ? &pieces[i + 1] : nullptr;
      bool is_few = (piece.last - piece.first) * group <= FEW;
      if (by_terms(piece.row)) attend_terms<KV>(p, piece);
      else if (!by_tiles) attend_piece<T, KV>(p, piece, after);
      else if (is_few) attend_few<KV>(p, piece, after);
      else attend_tiles<KV>(p, piece, after);
    }
  });
}
template <class T> static void attend_any(const Attention& p, int threads) {
  if (p.kv_dtype == 0) attend<T, float>(p, threads);
  else if (p.kv_dtype == 1) attend<T, bf16>(p, threads);
  else attend<T, fp8>(p, threads);
}

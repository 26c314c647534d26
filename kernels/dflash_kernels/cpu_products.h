// Products by weights that are laid out once, in float32 and bfloat16.

#pragma once
#include "cpu_numbers.h"

// Weights that are fetched while a product computes: `bytes` more for each line of a vector of numbers that it reads, and those of
// its vectors `apart`; where the product reads bfloat16, in tiles as it does. The processor foresees too few of them by itself.
struct Fetched { const char* at = nullptr; long bytes = 0, apart = 0; };
// out[r][j] (+)= sum over k of a[r][k] * b[k][j], for ROWS rows and COLS vectors: rows of b lie `step` numbers apart, its
// vectors `apart`. Numbers of bfloat16 lie in pairs of tiles, and pairs of vectors `apart`.
template <int ROWS, int COLS, class B>
static void product(const float* a, long a_step, const B* b, long step, long apart, long count, bool add, float* out, long out_step, Fetched fetched) {
  const char* next = fetched.at ? fetched.at : (const char*)b;  // which is there
  Floats sums[ROWS][COLS];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < COLS; j++) sums[r][j] = add ? load(out + r * out_step + j * LANES) : Floats{};
  if constexpr (sizeof(B) == 4) {
    for (long k = 0; k < count; k++, next += fetched.bytes) {
      Floats column[COLS];
      for (int j = 0; j < COLS; j++) column[j] = load(b + k * step + j * apart), __builtin_prefetch(next + j * fetched.apart, 0, 2);
      for (int r = 0; r < ROWS; r++) {
        Floats x = all(a[r * a_step + k]);
        for (int j = 0; j < COLS; j++) sums[r][j] += x * column[j];
      }
    }
  } else {
    for (long k = 0; k < count; k += 32, a += 32, b += 1024, next += 2048)
      for (int i = 0; i < 16; i++) {
        Bits pair[COLS];
        for (int j = 0; j < COLS; j++) {
          long half = j / 2 * apart + j % 2 * 512;
          pair[j] = vector_at<Bits>(b + half + i * 2 * LANES);
          __builtin_prefetch(next + half * 2 + i * fetched.bytes, 0, 2);
        }
        for (int r = 0; r < ROWS; r++)
          for (int j = 0; j < COLS; j++) sums[r][j] += all(a[r * a_step + 2 * i]) * (Floats)(pair[j] << 16);
        for (int r = 0; r < ROWS; r++)
          for (int j = 0; j < COLS; j++) sums[r][j] += all(a[r * a_step + 2 * i + 1]) * (Floats)(pair[j] & 0xffff0000u);
      }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < COLS; j++) store(out + r * out_step + j * LANES, sums[r][j]);
}
// Vectors of a product whose sums registers hold, beside the numbers that they are made of.
constexpr int vectors_held(int rows) { return REGISTER_BYTES == 64 || rows == 1 ? VECTORS : rows <= 3 ? 2 : 1; }
template <int ROWS, int COLS, class B>
static void product_columns(int first, int vectors, const float* a, long a_step, const B* b, long step, long apart, long count, bool add, float* out, long out_step, Fetched fetched) {
  for (; first + COLS <= vectors; first += COLS) {
    long offset = sizeof(B) == 4 ? first * apart : first / 2 * apart + first % 2 * 512;
    Fetched next = fetched;
    if (next.at) next.at += sizeof(B) == 4 ? first * fetched.apart : offset * 2;
    product<ROWS, COLS>(a, a_step, b + offset, step, apart, count, add, out + first * LANES, out_step, next);
  }
  if constexpr (COLS > 1) product_columns<ROWS, COLS - 1>(first, vectors, a, a_step, b, step, apart, count, add, out, out_step, fetched);
}
// Of at most AT_ONCE rows and VECTORS vectors.
template <class B>
static void products(int rows, int vectors, const float* a, long a_step, const B* b, long step, long apart, long count, bool add, float* out, long out_step, Fetched fetched = {}) {
  auto of = [&](auto constant) {
    constexpr int ROWS = decltype(constant)::value;
    product_columns<ROWS, vectors_held(ROWS)>(0, vectors, a, a_step, b, step, apart, count, add, out, out_step, fetched);
  };
  switch (rows) {
    case 1: return of(std::integral_constant<int, 1>());
    case 2: return of(std::integral_constant<int, 2>());
    case 3: return of(std::integral_constant<int, 3>());
    case 4: return of(std::integral_constant<int, 4>());
    case 5: return of(std::integral_constant<int, 5>());
    default: return of(std::integral_constant<int, AT_ONCE>());
  }
}

#if HAS_PAIRS
// A pair of neighbouring numbers, in all lanes.
static inline __m512bh pair_at(const bf16* from) {
  int32_t both;
  std::memcpy(&both, from, 4);
  return (__m512bh)_mm512_set1_epi32(both);
}
// Memory that is fetched while a product computes: `lines` of it for two of its inputs. own: the product's own numbers as well, 32 inputs
// before they are read, which the processor does not foresee: they lie in several streams. They go past the second cache, where others' data stay.
struct Ahead {
  const char* at; int lines; bool own = false;
  void fetch() {
    for (int i = 0; i < lines; i++, at += 64) __builtin_prefetch(at, 0, 2);
  }
};
// out[r][j] = sum over k of a[r][k] * b[k][j] in bfloat16, as `product`, of ROWS rows and PANELS pairs of panels, `apart`.
template <int ROWS, int PANELS>
static void pair_product(const bf16* a, long a_step, const bf16* b, long apart, long count, float* out, long out_step, Ahead& ahead) {
  __m512 sums[ROWS][2 * PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < 2 * PANELS; j++) sums[r][j] = _mm512_setzero_ps();
  for (long k = 0; k < count; k += 2) {
    const bf16* at = b + k / 32 * 1024 + k % 32 * LANES;
    ahead.fetch();
    __m512bh column[2 * PANELS];
    for (int j = 0; j < 2 * PANELS; j++) column[j] = (__m512bh)_mm512_loadu_si512(at + j / 2 * apart + j % 2 * 512);
    for (int j = 0; ahead.own && j < 2 * PANELS; j++) _mm_prefetch((const char*)(at + 1024 + j / 2 * apart + j % 2 * 512), _MM_HINT_NTA);
    for (int r = 0; r < ROWS; r++) {
      __m512bh x = pair_at(a + r * a_step + k);
      for (int j = 0; j < 2 * PANELS; j++) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], x, column[j]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < 2 * PANELS; j++) _mm512_storeu_ps(out + r * out_step + j * LANES, sums[r][j]);
}
template <int PANELS>
static void pair_products(int rows, const bf16* a, long a_step, const bf16* b, long apart, long count, float* out, long out_step, Ahead& ahead) {
  switch (rows) {
    case 1: return pair_product<1, PANELS>(a, a_step, b, apart, count, out, out_step, ahead);
    case 2: return pair_product<2, PANELS>(a, a_step, b, apart, count, out, out_step, ahead);
    case 3: return pair_product<3, PANELS>(a, a_step, b, apart, count, out, out_step, ahead);
    case 4: return pair_product<4, PANELS>(a, a_step, b, apart, count, out, out_step, ahead);
    case 5: return pair_product<5, PANELS>(a, a_step, b, apart, count, out, out_step, ahead);
    default: return pair_product<AT_ONCE, PANELS>(a, a_step, b, apart, count, out, out_step, ahead);
  }
}
#endif

// A packed weight. kind: how its numbers lie. n, k: outputs and inputs. next, next_bytes: the numbers of the weight whose
// product comes after this one's, as a rule, or null. They are fetched and never read, so that weight may be gone.
//
// float32: panels of 16 outputs, `[k][16]`. bfloat16: pairs of panels, 32 outputs, `[k / 32][2][16][16][2]`: of 32 inputs
// two tiles of AMX, a kilobyte each, in which neighbouring inputs lie side by side. Numbers of float32 that are all bfloat16 lie as those
// do, `k` a multiple of 32; where numbers of bfloat16 are not multiplied in pairs, they are widened in each pass of a product over them.
// Grids (`cpu_grids.h`) hold the very numbers in fewer bits, in units of 32 inputs: of 32 outputs where pairs of bfloat16 are multiplied,
// which become such a pair of tiles, else of 16, which become 32 inputs of a panel of float32.
// They come in four forms: codes of 4 and 8 bits by steps in float16, the same by steps in float32.
enum Kind { FLOATS, HALVES, GRID4, GRID8, WIDE4, WIDE8, FLOAT_GRID4, FLOAT_GRID8, FLOAT_WIDE4, FLOAT_WIDE8, FLOAT_HALVES, KINDS };
struct Weight { int64_t kind, n, k; const void* numbers; const char* next; int64_t next_bytes; };
constexpr int GRIDS_HELD = REGISTER_BYTES == 64 ? VECTORS : 2;  // vectors whose sums few rows keep in registers, beside what makes numbers of grids
constexpr long PAIR = 2 * LANES, DEEP = 32, TILES = PAIR * DEEP;  // numbers of a pair of tiles

static inline bool is_float(int64_t kind) { return kind == FLOATS || kind >= FLOAT_GRID4; }
static inline bool is_halves(int64_t kind) { return kind == HALVES || kind == FLOAT_HALVES; }
static inline bool is_grid(int64_t kind) { return kind >= GRID4 && kind != FLOAT_HALVES; }
static inline bool is_in_pairs(int64_t kind) { return is_halves(kind) || (HAS_PAIRS && !is_float(kind)); }
static inline long rounded_up(long x, long to) { return (x + to - 1) / to * to; }
static inline long depth(int64_t kind, long k) { return kind == FLOATS ? k : rounded_up(k, DEEP); }
static inline long outputs_of_unit(int64_t kind) { return is_in_pairs(kind) ? PAIR : LANES; }
// Whose units of the same inputs lie side by side, as a product reads them.
static inline long outputs_together(int64_t kind) { return is_in_pairs(kind) ? PAIR : LANES * GRIDS_HELD; }
static long unit_bytes(int64_t kind);  // of a grid
static long packed_bytes(int64_t kind, long n, long k) {
  if (kind == FLOATS) return rounded_up(n, LANES) * k * 4;
  if (is_halves(kind)) return rounded_up(n, PAIR) * depth(kind, k) * 2;
  return rounded_up(n, outputs_together(kind)) / outputs_of_unit(kind) * (k / DEEP) * unit_bytes(kind);
}
static inline long place(long row, long col, long deep) {  // in bfloat16
  return row / PAIR * deep * PAIR + col / DEEP * TILES + row / LANES % 2 * (TILES / 2) + col % DEEP / 2 * PAIR + row % LANES * 2 + col % 2;
}
static void pack_floats(const float* w, long n, long k, float* out, int threads) {
  share(threads, rounded_up(n, LANES) / LANES, 1, [&](long first, long last) {
    for (long panel = first; panel < last; panel++) {
      float* to = out + panel * k * LANES;
      for (long lane = 0; lane < LANES; lane++) {
        long row = panel * LANES + lane;
        for (long col = 0; col < k; col++) to[col * LANES + lane] = row < n ? w[row * k + col] : 0.0f;
      }
    }
  });
}
static uint16_t half_of(bf16 x) { return x.bits; }
static uint16_t half_of(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return uint16_t(bits >> 16); }
template <class T> static void pack_halves(const T* w, long n, long k, bf16* out, int threads) {
  long deep = depth(HALVES, k);
  share(threads, rounded_up(n, PAIR) / PAIR, 1, [&](long first, long last) {
    std::memset((void*)(out + first * deep * PAIR), 0, (last - first) * deep * PAIR * sizeof(bf16));
    for (long row = first * PAIR; row < std::min(n, last * PAIR); row++)
      for (long begin = 0; begin < k; begin += DEEP) {
        bf16* to = out + place(row, begin, deep);
        for (long col = 0; col < std::min(DEEP, k - begin); col++) to[col / 2 * PAIR + col % 2].bits = half_of(w[row * k + begin + col]);
      }
  });
}

#include "cpu_grids.h"

constexpr long AT_A_TIME = 64;      // inputs of which rows of few passes compute while the next ones are fetched
constexpr long PASSES_THAT_WAIT = 3;  // for memory
constexpr long FUSED = 4;           // rows whose sums are in registers while numbers of a grid are made
constexpr long ROWS_TO_FUSE = 8;    // in passes of so many, up to which it pays to make numbers again
constexpr long ROWS_OF_SUMS = 512;  // rows whose sums its second cache holds
static_assert(DEPTH_AT_ONCE % AT_A_TIME == 0 && AT_A_TIME % DEEP == 0);

struct Product {
  const void* x; const Weight* weight; const void* bias; void* out;
  long m, n, k, x_step;
  bool is_gelu = false;  // of a gate
};
// Where the numbers of a pair of panels are, from an input on.
static const bf16* tiles_of(const Weight& w, long pair, long begin) {
  return (const bf16*)w.numbers + (pair * (depth(w.kind, w.k) / DEEP) + begin / DEEP) * TILES;
}
#if HAS_PAIRS
// The numbers of inputs [begin, end), multiples of 32, of a pair of panels: where they are, or made at `made`.
static const bf16* numbers_of(const Weight& w, long pair, long begin, long end, bf16* made) {
  if (w.kind == HALVES) return tiles_of(w, pair, begin);
  for (long col = begin; col < end; col += DEEP) unpack_unit(w, unit_of(w, pair * PAIR, col), made + (col - begin) * PAIR);
  return made;
}
#endif
#include "cpu_tiles.h"

#if HAS_PAIRS
// Of at most AT_ONCE rows from `row` on by one or two pairs of panels from `first` on, whose numbers are at `packed`.
static void pair_rows(const Product& p, const bf16* x, long x_step, long row, long first, const bf16* packed, Ahead ahead) {
  long deep = depth(p.weight->kind, p.k), apart = deep * PAIR, pairs = rounded_up(p.n, PAIR) / PAIR;
  int rows = int(std::min<long>(AT_ONCE, p.m - row)), vectors = int(std::min<long>(VECTORS, (pairs - first) * 2));
  float sums[AT_ONCE * VECTORS * LANES], part[AT_ONCE * VECTORS * LANES];
  for (long begin = 0; begin < deep; begin += DEPTH_AT_ONCE) {
    const bf16 *from = packed + begin * PAIR, *at = x + row * x_step + begin;
    long count = std::min(DEPTH_AT_ONCE, deep - begin);
    float* into = begin ? part : sums;
    if (vectors > 2) pair_products<2>(rows, at, x_step, from, apart, count, into, VECTORS * LANES, ahead);
    else pair_products<1>(rows, at, x_step, from, apart, count, into, VECTORS * LANES, ahead);
    for (int r = 0; begin && r < rows; r++)
      for (int j = 0; j < vectors; j++) {
        float* sum = sums + (r * VECTORS + j) * LANES;
        store(sum, load(sum) + load(part + (r * VECTORS + j) * LANES));
      }
  }
  for (int j = 0; j < vectors; j++) {
    long col = first * PAIR + j * LANES;
    int count = int(std::min<long>(LANES, p.n - col));
    if (count <= 0) break;
    Floats offset = p.bias ? load_some((const bf16*)p.bias + col, count) : Floats{};
    for (int r = 0; r < rows; r++) store_some((bf16*)p.out + (row + r) * p.n + col, load(sums + (r * VECTORS + j) * LANES) + offset, count);
  }
}
#endif

// Numbers on a grid of inputs [begin, end), of `vectors` panels from `first` on, as float32 `[vectors][end - begin][16]`.
static void make_floats(const Weight& w, long first, int vectors, long begin, long end, float* made) {
  for (long col = begin; col < end; col += DEEP)
    for (int j = 0; j < vectors; j++) unpack_unit(w, unit_of(w, (first + j) * LANES, col), made + (j * (end - begin) + col - begin) * LANES);
}
// Where the numbers of a panel begin, from an input on; of bfloat16 those of an even panel.
static const char* numbers_at(const Weight& w, long panel, long begin) {
  long deep = depth(w.kind, w.k);
  return (const char*)w.numbers + (w.kind == FLOATS ? panel * deep + begin : panel * deep / 2 + begin) * 64;
}
// What the pass `pass` of `passes` over `count` inputs fetches of those that lie at `at`: its part of them.
static Fetched fetched_in(const Weight& w, const char* at, long count, long pass, long passes) {
  if (!at) return {};
  if (w.kind == FLOATS) return {at + count * 64 * pass / passes, 64 / passes, w.k * 64};
  return {at + DEEP * 32 * pass / passes, 64 / passes};
}
// Of rows [row, last), which are `x`, by `vectors` panels from `first` on, some inputs at a time for all rows. Those that come next
// are fetched meanwhile; after the last ones those of panel `next`, where it is one.
template <class T> static void panel_products(const Product& p, long row, long last, long first, int vectors, long next) {
  const Weight& w = *p.weight;
  long width = VECTORS * LANES, deep = depth(w.kind, p.k), passes = (last - row + AT_ONCE - 1) / AT_ONCE, at_once = (last - row + passes - 1) / passes;
  long most = passes <= PASSES_THAT_WAIT ? AT_A_TIME : DEPTH_AT_ONCE;
  bool is_made = is_grid(w.kind);
  float* sums = scratch((last - row) * width * 2 + (is_made ? most * width : 0));
  float *parts = sums + (last - row) * width, *made = parts + (last - row) * width;
  for (long begin = 0; begin < deep; begin += most) {
    long end = std::min(deep, begin + most), count = end - begin;
    if (is_made) make_floats(w, first, vectors, begin, end, made);
    const char* from = is_made ? nullptr : numbers_at(w, first, begin);
    const char* coming = is_made ? nullptr : end < deep ? numbers_at(w, first, end) : next * LANES < p.n ? numbers_at(w, next, 0) : nullptr;
    bool adds = begin % DEPTH_AT_ONCE != 0, ends = end % DEPTH_AT_ONCE == 0 || end == deep;
    float* into = begin < DEPTH_AT_ONCE ? sums : parts;
    for (long at = row, pass = 0; at < last; at += at_once, pass++) {
      int rows = int(std::min<long>(at_once, last - at));
      float *to = into + (at - row) * width, *sum = sums + (at - row) * width;
      const float* a = (const float*)p.x + at * p.x_step + begin;
      Fetched fetched = fetched_in(w, coming, count, pass, passes);
      if (is_made) products(rows, vectors, a, p.x_step, made, LANES, count * LANES, count, adds, to, width, fetched);
      else if (w.kind == FLOATS) products(rows, vectors, a, p.x_step, (const float*)from, LANES, deep * LANES, count, adds, to, width, fetched);
      else products(rows, vectors, a, p.x_step, (const bf16*)from, LANES, deep * PAIR, count, adds, to, width, fetched);
      if (ends && to != sum)
        for (long i = 0; i < rows * width; i += LANES) store(sum + i, load(sum + i) + load(to + i));
    }
  }
  for (int j = 0; j < vectors; j++) {
    long col = (first + j) * LANES;
    int count = int(std::min<long>(LANES, p.n - col));
    if (count <= 0) break;
    Floats offset = p.bias ? load_some((const T*)p.bias + col, count) : Floats{};
    for (long at = row; at < last; at++)
      store_some((T*)p.out + at * p.n + col, load(sums + (at - row) * width + j * LANES) + offset, count);
  }
}
// The same of ROWS rows, whose sums are kept in registers while numbers are made, each for all of them: with few rows to store
// numbers and to read them again takes longer than to multiply by them.
template <class T, int GRID, int ROWS, int PANELS> static void few_rows_of_grid(const Product& p, long row, long first) {
  constexpr Grid G = GRIDS[GRID];
  constexpr int CODES = 32 / G.bits, WORDS = DEEP / CODES, RUN = WORDS * G.inputs / DEEP;  // words that share their steps
  constexpr long NUMBERS = LANES * G.number_bytes, GROUP = NUMBERS * (G.has_leasts ? 2 : 1);
  const Weight& w = *p.weight;
  const float* x = (const float*)p.x + row * p.x_step;
  Floats sums[ROWS][PANELS], parts[ROWS][PANELS];
  for (long begin = 0; begin < w.k; begin += DEEP) {
    if (begin % DEPTH_AT_ONCE == 0)
      for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < PANELS; j++) parts[r][j] = Floats{};
    const uint8_t* unit[PANELS];
    for (int j = 0; j < PANELS; j++) unit[j] = unit_of(w, (first + j) * LANES, begin), fetch_after(w, unit[j], FETCHED_SIDE_BY_SIDE);
    for (int group = 0; group < WORDS / RUN; group++) {
      Floats step[PANELS], least[PANELS]{};
      for (int j = 0; j < PANELS; j++) {
        const uint8_t* at = unit[j] + WORDS * LANES * 4 + group * GROUP;
        step[j] = widened<G.number_bytes>(at);
        if constexpr (G.has_leasts) least[j] = widened<G.number_bytes>(at + NUMBERS);
      }
      for (int word = group * RUN; word < (group + 1) * RUN; word++) {
        Bits codes[PANELS];
        for (int j = 0; j < PANELS; j++) codes[j] = vector_at<Bits>(unit[j] + word * LANES * 4);
#pragma GCC unroll 8
        for (int i = 0; i < CODES; i++)
          for (int j = 0; j < PANELS; j++) {
            Floats number = codes_of<G.bits>(codes[j], i) * step[j] + least[j];
            for (int r = 0; r < ROWS; r++) parts[r][j] += all(x[r * p.x_step + begin + word * CODES + i]) * number;
          }
      }
    }
    long end = begin + DEEP;
    if (end % DEPTH_AT_ONCE == 0 || end == w.k)
      for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < PANELS; j++) sums[r][j] = begin < DEPTH_AT_ONCE ? parts[r][j] : sums[r][j] + parts[r][j];
  }
  for (int j = 0; j < PANELS; j++) {
    long col = (first + j) * LANES;
    int count = int(std::min<long>(LANES, p.n - col));
    Floats offset = p.bias ? load_some((const T*)p.bias + col, count) : Floats{};
    for (int r = 0; r < ROWS; r++) store_some((T*)p.out + (row + r) * p.n + col, sums[r][j] + offset, count);
  }
}
template <class T, int GRID, int ROWS> static void few_rows_of_grid(const Product& p, long row, long first, int panels) {
  constexpr int HELD = REGISTER_BYTES == 64 || ROWS <= 2 ? GRIDS_HELD : 1;
  int j = 0;
  for (; j + HELD <= panels; j += HELD) few_rows_of_grid<T, GRID, ROWS, HELD>(p, row, first + j);
  for (; j < panels; j++) few_rows_of_grid<T, GRID, ROWS, 1>(p, row, first + j);
}
template <class T, int GRID> static void few_rows_of_grid(const Product& p, long first, int panels) {
  for (long row = 0; row < p.m;) {
    long passes = (p.m - row + FUSED - 1) / FUSED, now = (p.m - row + passes - 1) / passes;
    switch (now) {
      case 1: few_rows_of_grid<T, GRID, 1>(p, row, first, panels); break;
      case 2: few_rows_of_grid<T, GRID, 2>(p, row, first, panels); break;
      case 3: few_rows_of_grid<T, GRID, 3>(p, row, first, panels); break;
      default: few_rows_of_grid<T, GRID, 4>(p, row, first, panels);
    }
    row += now;
  }
}
// T: float32 or bfloat16, as the weight's type and the result's. The rows are in float32, as deep as the weight.
template <class T> static void linear_panels(const Product& p, int threads) {
  long panels = rounded_up(p.n, LANES) / LANES, groups = (panels + VECTORS - 1) / VECTORS;
  const Weight& w = *p.weight;
  share(threads, groups, 1, [&](long first, long last) {
    for (long row = 0; row < p.m; row += ROWS_OF_SUMS)
      for (long group = first; group < last; group++) {
        long panel = group * VECTORS, next = group + 1 < last ? group + 1 : last + std::max(0, threads - 1) * (last - first);  // as it seems
        int vectors = int(std::min<long>(VECTORS, panels - panel));
        if (!is_grid(w.kind) || p.m > ROWS_TO_FUSE) {
          panel_products<T>(p, row, std::min(p.m, row + ROWS_OF_SUMS), panel, vectors, next * VECTORS);
          continue;
        }
        switch ((w.kind - GRID4) % 4) {
          case 0: few_rows_of_grid<T, 0>(p, panel, vectors); break;
          case 1: few_rows_of_grid<T, 1>(p, panel, vectors); break;
          case 2: few_rows_of_grid<T, 2>(p, panel, vectors); break;
          default: few_rows_of_grid<T, 3>(p, panel, vectors);
        }
      }
  });
}
#if HAS_PAIRS
constexpr long OWN_AHEAD_ROWS = 24;  // up to these a product waits for memory
constexpr long COMING_BYTES = 1 << 20;  // of the next weight that come before its product begins
// Calls `each(two, packed, next)` for two pairs of panels after the other, with their numbers, where they are or made, and where
// those are that this thread takes next, as it seems, be it of the next weight; null where they are made, or not known.
template <class Each> static void each_two_pairs(const Product& p, int threads, const Each& each) {
  long deep = depth(p.weight->kind, p.k), pairs = rounded_up(p.n, PAIR) / PAIR, of_two = deep * 2 * PAIR * long(sizeof(bf16));
  const char* after = p.weight->next;
  long after_bytes = p.weight->next_bytes;
  share(threads, (pairs + 1) / 2, 1, [&](long first, long last) {
    for (long two = first; two < last; two++) {
      const bf16* packed = (const bf16*)p.weight->numbers + two * 2 * deep * PAIR;
      if (p.weight->kind != HALVES) {
        bf16* made = (bf16*)scratch(deep * PAIR);
        for (long pair = two * 2; pair < std::min(pairs, two * 2 + 2); pair++) numbers_of(*p.weight, pair, 0, deep, made + (pair - two * 2) * deep * PAIR);
        packed = made;
      }
      long next = two + 1 < last ? two + 1 : last + std::max(0, threads - 1) * (last - first), past = (next - (pairs + 1) / 2) * of_two;
      const char* at = nullptr;
      if (p.weight->kind == HALVES && next < pairs / 2) at = (const char*)p.weight->numbers + next * of_two;
      else if (p.weight->kind == HALVES && after && past >= 0 && past + of_two <= after_bytes) at = after + past;
      each(two, packed, at);
    }
    // What the last products fetched comes first.
    const char* from = after && threads > 1 ? after + threads * of_two : nullptr;
    coming = Coming{from, from ? std::min(from + COMING_BYTES, after + after_bytes) : nullptr};
  });
}
// The product with rows of x that go on as far as tiles and pairs are read.
static Product with_whole_rows(Product p) {
  long deep = depth(p.weight->kind, p.k);
  if (deep == p.k) return p;
  bf16* wide = (bf16*)scratch(p.m * deep / 2, OF_ALL);
  for (long r = 0; r < p.m; r++) {
    std::memcpy((void*)(wide + r * deep), (const bf16*)p.x + r * p.x_step, p.k * 2);
    std::memset((void*)(wide + r * deep + p.k), 0, (deep - p.k) * 2);
  }
  p.x = wide;
  p.x_step = deep;
  return p;
}
#endif
// out: what the gate, the first half of a weight, lets through of the other half's product, `[m][n]`. Returns false, and does nothing,
// where no tiles compute it.
static bool linear_gated(const Product& narrow, int threads) {
#if defined(__AMX_BF16__)
  if (!has_tiles || narrow.n % PAIR) return false;
  if (narrow.weight->kind == FLOAT_HALVES) {
    Product p = in_terms(narrow, threads);
    share(threads, p.n / PAIR, 1, [&](long first, long last) { term_product<2>(p, first, last); });
    return true;
  }
  if (is_float(narrow.weight->kind)) return false;
  Product p = with_whole_rows(narrow);
  share(threads, p.n / PAIR, 1, [&](long first, long last) { tile_product<2>(p, first, last, threads); });
  return true;
#else
  return false;
#endif
}
static void linear_float(const Product& whole, int threads) {
#if defined(__AMX_BF16__)
  if (has_tiles && whole.weight->kind == FLOAT_HALVES) {
    Product p = in_terms(whole, threads);
    return share(threads, rounded_up(p.n, PAIR) / PAIR, 1, [&](long first, long last) { term_product<1>(p, first, last); });
  }
#endif
  linear_panels<float>(whole, threads);
}
static void linear_bf16(const Product& narrow, int threads) {
#if HAS_PAIRS
  Product p = with_whole_rows(narrow);
  long deep = depth(p.weight->kind, p.k);
#if defined(__AMX_BF16__)
  if (has_tiles)
    return share(threads, rounded_up(p.n, PAIR) / PAIR, 1, [&](long first, long last) { tile_product<1>(p, first, last, threads); });
#endif
  // Few rows wait for memory: while they compute, a part of the next numbers comes in each pass over the present ones.
  bool own = p.weight->kind == HALVES && p.m <= OWN_AHEAD_ROWS;
  int lines = p.m > 3 * AT_ONCE ? 1 : p.m > AT_ONCE ? 2 : 4;
  long of_pass = deep / 2 * lines * 64, of_two = deep * 2 * PAIR * long(sizeof(bf16));
  each_two_pairs(p, threads, [&](long two, const bf16* packed, const char* next) {
    for (long row = 0; row < p.m; row += AT_ONCE) {
      long done = row / AT_ONCE * of_pass;
      bool fetches = next && done < of_two;
      pair_rows(p, (const bf16*)p.x, p.x_step, row, two * 2, packed, Ahead{next + (fetches ? done : 0), fetches ? lines : 0, own});
    }
  });
#else
  Product p = narrow;
  long deep = depth(p.weight->kind, p.k);
  float* wide = scratch(p.m * deep, OF_ALL);
  share(threads, p.m, std::max<long>(1, 16384 / deep), [&](long first, long last) {
    for (long r = first; r < last; r++)
      for (long c = 0; c < deep; c += LANES)
        store(wide + r * deep + c, c < p.k ? load_some((const bf16*)p.x + r * p.x_step + c, int(std::min<long>(LANES, p.k - c))) : Floats{});
  });
  p.x = wide, p.x_step = deep;
  linear_panels<bf16>(p, threads);
#endif
}
// Rows of a weight as numbers of its type.
static void unpack_rows(const Weight& w, const int64_t* rows, long count, void* out, int threads) {
  share(threads, count, std::max<long>(1, 8192 / w.k), [&](long first, long last) {
    for (long i = first; i < last; i++)
      for (long col = 0; col < w.k; col++) {
        if (w.kind == FLOATS) ((float*)out)[i * w.k + col] = ((const float*)w.numbers)[rows[i] / LANES * w.k * LANES + col * LANES + rows[i] % LANES];
        else if (w.kind == FLOAT_HALVES) ((float*)out)[i * w.k + col] = to_float(((const bf16*)w.numbers)[place(rows[i], col, w.k)]);
        else if (w.kind == HALVES) ((bf16*)out)[i * w.k + col] = ((const bf16*)w.numbers)[place(rows[i], col, depth(HALVES, w.k))];
        else if (is_float(w.kind)) ((float*)out)[i * w.k + col] = number_at(w, rows[i], col);
        else {
          bf16 number[LANES];
          store(number, all(number_at(w, rows[i], col)));
          ((bf16*)out)[i * w.k + col] = number[0];
        }
      }
  });
}

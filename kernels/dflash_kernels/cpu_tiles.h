// Products by tiles of AMX: of rows of bfloat16, and of rows of float32 as sums of three of bfloat16. `cpu_products.h` says how weights lie.

#pragma once

#if defined(__AMX_BF16__)
struct TileConfig { uint8_t palette = 1, start = 0, none[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; };
// The compiler takes the instruction to read eight bytes of it.
static inline void load_config(const TileConfig& c) {
  __asm__ volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}
static bool has_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // asks the system for the tiles' state
static void set_tiles(long upper, long lower) {
  TileConfig c;
  for (int t = 0; t < 8; t++) {
    c.rows[t] = uint8_t(t >= 6 ? 16 : (t == 2 || t == 3 || t == 5) ? lower : upper);
    c.bytes[t] = c.rows[t] ? 64 : 0;
  }
  load_config(c);
}
static void free_tiles() { _tile_release(); }
constexpr long CHUNK = 384;                // inputs of a pair of panels that a core's first cache holds beside the rows
constexpr long ROWS_BYTES = 1024 * 1024;   // of x that its second cache holds
constexpr long MANY_ROWS = 256;            // for which numbers are read once
constexpr long LINES = 32;                 // of a pair of tiles, in a core's caches
constexpr long AHEAD_BYTES = 8192;         // of what a first pass fetches
constexpr long SUMS = 6 * 256;             // of 32 rows and a pair of panels, or of the terms of 16
// A number of float32 is the sum of three of bfloat16, whose products by one of bfloat16 are exact in float32: rows of such numbers are
// multiplied term by term, and the sums of the terms are added at last.
template <class T> constexpr int TERMS = std::is_same<T, float>::value ? 3 : 1;
// The results of rows from their sums of a pair of panels: of a product, or of those of a gate and of what passes it, which are
// PARTS of one weight, below each other, SUMS apart. What a gate lets through is made a few rows at a time while tiles multiply what comes next.
template <class T, int PARTS> struct Results {
  const Product& p;
  long of_panel = 256, of_term = 0;  // how far the sums of the second panel, and of the next of a row's TERMS, are from the first
  const float* sums;
  long first_row, count = 0, done = 0, at_once, col, columns;
  Floats offsets[2 * PARTS];
  int some[2];
  void begin(const float* of, long row, long rows, long pair, long steps) {
    const T* bias = (const T*)p.bias;
    sums = of, first_row = row, count = rows, done = 0, at_once = (rows + steps - 1) / steps, col = pair * PAIR, columns = std::min(PAIR, p.n - col);
    for (int j = 0; j < 2; j++) {
      some[j] = int(std::max<long>(0, std::min<long>(LANES, columns - j * LANES)));
      for (int i = 0; i < PARTS; i++) offsets[2 * i + j] = bias ? load_some(bias + i * p.n + col + j * LANES, some[j]) : Floats{};
    }
  }
  void go_on(long rows) {
    if (done == count) return;
    long row = done, end = done = std::min(count, done + rows), step = p.n;
    bool whole = columns == PAIR, is_gelu = p.is_gelu;
    T* to = (T*)p.out + (first_row + row) * step + col;
    auto sum_at = [&](const float* from) {
      Floats sum = load(from);
      for (int i = 1; i < TERMS<T>; i++) sum += load(from + i * of_term);
      return sum;
    };
    Floats offset[2 * PARTS];  // in registers
    for (int i = 0; i < 2 * PARTS; i++) offset[i] = offsets[i];
    for (; row < end; row++, to += step) {
      const float* from = sums + row / 16 * 512 + row % 16 * 16;
      Floats halves[2];
      for (int j = 0; j < 2; j++) {
        halves[j] = sum_at(from + j * of_panel) + offset[j];
        if (PARTS > 1) halves[j] = gated<T>(rounded<T>(halves[j]), rounded<T>(sum_at(from + j * of_panel + SUMS) + offset[2 * PARTS - 2 + j]), is_gelu);
      }
      if (whole && TERMS<T> == 1) _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)halves[1], (__m512)halves[0]));
      else for (int j = 0; j < 2; j++) store_some(to + j * LANES, halves[j], some[j]);
    }
  }
};
// Adds the products of `count` inputs to the sums of 32 rows and a pair of panels, four tiles; sets them unless `add`. Meanwhile `ahead`
// is fetched, and results of the rows before are made. ONCE: the panels are not read again, so the first cache keeps what it has.
template <bool LOWER, bool ONCE, int PARTS>
static void sum_tiles(const bf16* a, long step, const bf16* b, long count, bool add, float* sums, Ahead ahead, Results<bf16, PARTS>& before) {
  if (add) { _tile_loadd(0, sums, 64); _tile_loadd(1, sums + 256, 64); } else { _tile_zero(0); _tile_zero(1); }
  if (LOWER && add) { _tile_loadd(2, sums + 512, 64); _tile_loadd(3, sums + 768, 64); } else if (LOWER) { _tile_zero(2); _tile_zero(3); }
  for (long k = 0; k < count; k += DEEP, b += TILES) {
    ahead.fetch();
    if (ONCE) { _tile_stream_loadd(6, b, 64); _tile_stream_loadd(7, b + TILES / 2, 64); }
    else { _tile_loadd(6, b, 64); _tile_loadd(7, b + TILES / 2, 64); }
    _tile_loadd(4, a + k, step * 2);
    if (LOWER) _tile_loadd(5, a + 16 * step + k, step * 2);
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
    if (LOWER) { _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
    if (PARTS > 1) before.go_on(before.at_once);
  }
  _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
  if (LOWER) { _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64); }
}
// Of rows [row, last), a pair of panels of each part and the inputs [from, until). While they compute, the numbers of the pair `next` come, a
// part in each pass over the present ones: but for the first pass, if the present ones have not come before. turn: which sums are the next
// ones. own: the pair's sums of these rows, where there are inputs before or after these; null where these are all.
template <int PARTS>
static void tile_pair(const Product& p, long row, long last, long pair, long from, long until, float* own, bool is_here, const bf16* next,
                      Results<bf16, PARTS>& results, long& turn) {
  const bf16* x = (const bf16*)p.x;
  long deep = depth(p.weight->kind, p.k), rows = rounded_up(last - row, PAIR), apart = rounded_up(p.n, PAIR) / PAIR, chunk = until - from;
  if (p.weight->kind != HALVES || (rows > 64 && chunk > 2 * CHUNK)) chunk = std::min(CHUNK, chunk);
  // Beside the sums of all passes, or of one, those whose results are still to come.
  bool in_chunks = chunk < deep;
  long passes = rows / PAIR, kept = in_chunks && !own ? passes : 1, held = kept + PARTS - 1;
  float* sums = scratch(held * SUMS * PARTS + CHUNK * PAIR / 2 * PARTS);
  bf16* made = (bf16*)(sums + held * SUMS * PARTS);
  long set = -1, late = is_here || passes == 1 ? 0 : 1, of_pass = (LINES + passes - late - 1) / (passes - late);
  for (long begin = from; begin < until; begin += chunk) {
    long end = std::min(until, begin + chunk);
    const bf16* b[PARTS];
    for (int i = 0; i < PARTS; i++) b[i] = numbers_of(*p.weight, pair + i * apart, begin, end, made + i * CHUNK * PAIR);
    for (long at = row; at < last; at += PAIR) {
      long upper = std::min<long>(16, last - at), lower = std::max<long>(0, std::min<long>(16, last - at - 16));
      if (set != upper * 32 + lower) set_tiles(upper, lower), set = upper * 32 + lower;
      long pass = (at - row) / PAIR;
      float* to = own ? own + pass * SUMS * PARTS : sums + (turn + (in_chunks ? pass : 0)) % held * SUMS * PARTS;
      for (int i = 0; i < PARTS; i++) {
        long done = (pass - late) * of_pass;
        Ahead ahead{nullptr, 0};
        if (pass < late || (!is_here && passes == 1)) ahead = Ahead{(const char*)b[i] + AHEAD_BYTES, p.weight->kind == HALVES ? int(LINES) : 0};
        else if (next && done < LINES) ahead = Ahead{(const char*)(next + (i * apart * deep + begin) * PAIR) + done * (end - begin) / DEEP * 64, int(of_pass)};
        bool once = passes == 1 && p.weight->kind == HALVES;
        auto sum = lower == 0 ? sum_tiles<false, false, PARTS> : once ? sum_tiles<true, true, PARTS> : sum_tiles<true, false, PARTS>;
        sum(x + at * p.x_step + begin, p.x_step, b[i], end - begin, begin > 0, to + i * SUMS, ahead, results);
      }
      results.go_on(PAIR);
      if (end == deep) results.begin(to, at, upper + lower, pair, PARTS * (chunk / DEEP));
      if (PARTS == 1) results.go_on(PAIR);
      turn += !in_chunks;
    }
  }
  turn += in_chunks && !own ? kept : 0;
}
// By pairs of panels [first, last).
template <int PARTS> static void tile_product(const Product& p, long first, long last, int threads) {
  thread_local const bf16* fetched = nullptr;  // numbers that this thread has fetched
  long deep = depth(p.weight->kind, p.k), most = std::max<long>(PAIR, ROWS_BYTES / 2 / deep / PAIR * PAIR), pairs = rounded_up(p.n, PAIR) / PAIR;
  auto numbers = [&](long pair) { return (const bf16*)p.weight->numbers + pair * deep * PAIR; };
  Results<bf16, PARTS> results{p};
  long turn = 0, range = deep, of_pair = 0;
  float* kept = nullptr;
  if (p.m > (p.weight->kind == HALVES ? 64 : PAIR) && most < std::min(p.m, MANY_ROWS)) {
    // Of wide rows few are in the cache together, and all numbers would be read anew for each few: instead the sums of many rows are kept,
    // and added to by some inputs of all pairs after the others.
    most = std::min(rounded_up(p.m, PAIR), MANY_ROWS);
    range = ROWS_BYTES / 2 / most / CHUNK * CHUNK, of_pair = most / PAIR * SUMS * PARTS;
    long others = PARTS * SUMS * PARTS + CHUNK * PAIR / 2 * PARTS;  // as `tile_pair` asks for
    kept = scratch(others + (last - first) * of_pair) + others;
  }
  for (long row = 0; row < p.m; row += most) {
    for (long from = 0; from < deep; from += range)
      for (long pair = first; pair < last; pair++) {
        long after = pair + 1 < last ? pair + 1 : last + std::max(0, threads - 1) * (last - first);  // as it seems
        const bf16* next = p.weight->kind == HALVES && p.m > PAIR && row == 0 && after < pairs ? numbers(after) : nullptr;
        float* own = kept ? kept + (pair - first) * of_pair : nullptr;
        tile_pair<PARTS>(p, row, std::min(p.m, row + most), pair, from, std::min(deep, from + range), own, row > 0 || fetched == numbers(pair), next, results, turn);
        if (next) fetched = next;
      }
    results.go_on(PAIR);  // the next rows may be fewer, and keep their sums elsewhere
  }
  free_tiles();
}
// The rows of float32 as the first terms of all of them, then the second and the third. Terms are cut off and not rounded, so that none
// overflows; tiles take those below the smallest normal number for 0.
static Product in_terms(Product p, int threads) {
  bf16* terms = (bf16*)scratch(p.m * p.k * TERMS<float> / 2, OF_ALL);
  share(threads, p.m, std::max<long>(1, 16384 / p.k), [&](long first, long last) {
    for (long r = first; r < last; r++)
      for (long c = 0; c < p.k; c += LANES) {
        Floats left = load((const float*)p.x + r * p.x_step + c);
        for (int i = 0; i < TERMS<float>; i++) {
          __m512i upper = _mm512_srli_epi32((__m512i)left, 16);
          _mm256_storeu_si256((__m256i*)(terms + (i * p.m + r) * p.k + c), _mm512_cvtepi32_epi16(upper));
          Floats term = (Floats)_mm512_slli_epi32(upper, 16);
          left = term == left ? Floats{} : left - term;  // also of an infinite number
        }
      }
  });
  p.x = terms, p.x_step = p.k;
  return p;
}
// Tiles 0 to 5: sums of `rows` rows; 6: these rows; 7: numbers of a panel.
static void set_term_tiles(long rows) {
  TileConfig c;
  for (int t = 0; t < 8; t++) c.rows[t] = uint8_t(t == 7 ? 16 : rows), c.bytes[t] = 64;
  load_config(c);
}
// As `sum_tiles`, of COUNT tiles of rows, `apart` numbers from one another.
template <int COUNT> static void sum_term_tiles(const bf16* a, long apart, long step, const bf16* b, long count, bool add, float* sums, Ahead ahead) {
  if (add) {
    _tile_loadd(0, sums, 64); _tile_loadd(1, sums + 256, 64);
    if (COUNT > 1) { _tile_loadd(2, sums + 512, 64); _tile_loadd(3, sums + 768, 64); _tile_loadd(4, sums + 1024, 64); _tile_loadd(5, sums + 1280, 64); }
  } else {
    _tile_zero(0); _tile_zero(1);
    if (COUNT > 1) { _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5); }
  }
  for (long k = 0; k < count; k += DEEP, b += TILES) {
    ahead.fetch();
    _tile_loadd(7, b, 64);
    _tile_loadd(6, a + k, step * 2); _tile_dpbf16ps(0, 6, 7);
    if (COUNT > 1) {
      _tile_loadd(6, a + apart + k, step * 2); _tile_dpbf16ps(1, 6, 7);
      _tile_loadd(6, a + 2 * apart + k, step * 2); _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, b + TILES / 2, 64);
      _tile_dpbf16ps(5, 6, 7);
      _tile_loadd(6, a + apart + k, step * 2); _tile_dpbf16ps(4, 6, 7);
      _tile_loadd(6, a + k, step * 2); _tile_dpbf16ps(3, 6, 7);
    } else {
      _tile_loadd(7, b + TILES / 2, 64);
      _tile_dpbf16ps(1, 6, 7);
    }
  }
  _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
  if (COUNT > 1) { _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64); _tile_stored(4, sums + 1024, 64); _tile_stored(5, sums + 1280, 64); }
}
// By pairs of panels [first, last) of a weight whose numbers of float32 are those of bfloat16, of rows in terms: of 16 at a time, or of so few
// that all their terms are in one tile.
template <int PARTS> static void term_product(const Product& p, long first, long last) {
  constexpr long ROWS_AT_ONCE = 16;
  const bf16* x = (const bf16*)p.x;
  long pairs = rounded_up(p.n, PAIR) / PAIR, apart = p.m * p.k, most = std::max<long>(ROWS_AT_ONCE, ROWS_BYTES / 2 / TERMS<float> / p.k / ROWS_AT_ONCE * ROWS_AT_ONCE);
  bool are_few = p.m * TERMS<float> <= ROWS_AT_ONCE;
  Results<float, PARTS> results{p, are_few ? 256 : TERMS<float> * 256, are_few ? p.m * LANES : 256};
  long set = -1;
  for (long row = 0; row < p.m; row += most)
    for (long pair = first; pair < last; pair++) {
      long end_row = std::min(p.m, row + most), passes = (end_row - row + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
      long chunk = passes > 2 && p.k > 2 * CHUNK ? CHUNK : p.k;
      float* sums = scratch((chunk < p.k ? passes : 1) * SUMS * PARTS);
      for (long begin = 0; begin < p.k; begin += chunk) {
        long end = std::min(p.k, begin + chunk);
        for (long at = row, pass = 0; at < end_row; at += ROWS_AT_ONCE, pass++) {
          long rows = std::min(ROWS_AT_ONCE, end_row - at);
          if (rows != set) set_term_tiles(are_few ? rows * TERMS<float> : rows), set = rows;
          float* to = sums + (chunk < p.k ? pass : 0) * SUMS * PARTS;
          for (long i = 0; i < PARTS; i++) {
            const bf16* b = tiles_of(*p.weight, pair + i * pairs, begin);
            Ahead ahead{(const char*)b + AHEAD_BYTES, row == 0 && pass == 0 ? int(LINES) : 0};
            auto sum = are_few ? sum_term_tiles<1> : sum_term_tiles<TERMS<float>>;
            sum(x + at * p.x_step + begin, apart, p.x_step, b, end - begin, begin > 0, to + i * SUMS, ahead);
          }
          if (end == p.k) results.begin(to, at, rows, pair, 1), results.go_on(PAIR);
        }
      }
    }
  free_tiles();
}
#else
constexpr bool has_tiles = false;
static void set_tiles(long, long) {}
static void free_tiles() {}
#endif

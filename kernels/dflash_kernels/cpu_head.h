// The token that a request chooses, by argmax, with its noise and filters or without, without the whole product by the head: codes of 8
// bits say of each logit between which bounds it lies, and only those that may be chosen are computed, by the head's own numbers.

#pragma once
#include "cpu_choice.h"
#include "cpu_products.h"

// codes: int8 `[n / 16][k / 2][16][2]`, n rounded up to 16 and k to 2; their numbers are theirs times an output's step. Of each output, n
// rounded up: step, the norm of what the codes miss, and that of the head's numbers or the codes', whichever is larger.
struct CoarseHead { int64_t n, k; const int8_t* codes; const float *steps, *errors, *norms; };

// Of each row: its temperature, seed and the position of its token, as of `Choice`, and what `lowest_kept` takes; null where no row
// has a temperature, or filters.
struct Sampling {
  const float* temperature; const int64_t *seeds, *positions, *top_k; const float *top_p, *min_p;
  bool by_rank(long row, long vocab) const { return top_k[row] > 0 && top_k[row] < vocab; }
  bool filters(long row, long vocab) const {
    return top_k && temperature[row] != 0.0f && (by_rank(row, vocab) || top_p[row] < 1.0f || min_p[row] > 0.0f);
  }
};

#if defined(__AVX2__) && defined(__FMA__)
#if defined(__AMX_INT8__)
static bool has_byte_tiles = has_tiles;
#else
constexpr bool has_byte_tiles = false;
#endif
// Rows up to which this is faster than the whole product: all where that multiplies 8 numbers at once, else those that wait for memory.
static int64_t coarse_rows_at_most(bool is_float) {
#if defined(__AMX_BF16__)
  if (has_tiles) return is_float && has_byte_tiles ? 32 : 4;
#endif
  return REGISTER_BYTES < 64 ? INT64_MAX : is_float ? 4 : 8;
}
constexpr int COARSE_ROWS = 4;  // whose sums registers hold
constexpr long FEW_OF = 8;      // one unit of so many may be computed by itself, of a single row two; the whole product is faster than more

// Rows of x as numbers of 16 bits, few enough that no sum of them times codes leaves 32. rounding: what logits are rounded by, of
// their size.
struct CoarseRows {
  Sampling sampling;
  long deep = 0;  // k, rounded up
  float rounding = 0.0f;
  std::vector<int16_t> numbers;
  std::vector<float> steps, norms, errors;  // of each row
  std::vector<bool> filters;                // whether a row does
};
template <class T> static bool coarse_rows(const Product& p, CoarseRows& rows) {
  rows.rounding = std::is_same<T, float>::value ? 0.0f : 1.0f / 256;
  long k = p.k, deep = rows.deep = rounded_up(k, 2);
  float most = std::min(32639.0f, std::floor(2147483392.0f / (127.0f * float(deep))));  // 127 * 256 + 127
  rows.numbers.assign(p.m * deep, 0), rows.steps.resize(p.m), rows.norms.resize(p.m), rows.errors.resize(p.m);
  for (long r = 0; r < p.m; r++) {
    const T* x = (const T*)p.x + r * p.x_step;
    float largest = 0.0f;
    double norm = 0.0, missed = 0.0;
    for (long c = 0; c < k; c++) {
      float number = to_float(x[c]);
      largest = std::max(largest, std::fabs(number)), norm += double(number) * number;
    }
    if (!(norm < 1e30)) return false;
    float step = std::max(largest / most, 1e-30f), by = 1.0f / step;
    for (long c = 0; c < k; c++) {
      float number = to_float(x[c]);
      long code = std::lrintf(number * by);
      double miss = double(number) - double(code) * step;
      rows.numbers[r * deep + c] = int16_t(code), missed += miss * miss;
    }
    // Sums in float32 are off by some of their last bits, the head's and these.
    rows.steps[r] = step, rows.norms[r] = float(std::sqrt(norm) * 1.0001);
    rows.errors[r] = float(std::sqrt(missed) * 1.0001 + std::sqrt(norm) * double(deep + 32) * 6e-8);
  }
  return true;
}
// Of ROWS rows from `x` on the sums of their numbers by the codes of a panel.
template <int ROWS> static inline void panel_sums(const int8_t* codes, const int16_t* x, long deep, __m256i sums[ROWS][2]) {
  auto two_at = [&](int r, long c) { int32_t two; std::memcpy(&two, x + r * deep + c, 4); return two; };
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  // Of even and odd pairs of inputs, since one sum would wait for itself.
  __m512i whole[ROWS][2];
  for (int r = 0; r < ROWS; r++) whole[r][0] = whole[r][1] = _mm512_setzero_si512();
  for (long c = 0; c < deep; c += 2, codes += 2 * LANES) {
    __builtin_prefetch(codes + 2048, 0, 2);
    __m512i own = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)codes));
    for (int r = 0; r < ROWS; r++) whole[r][0] = _mm512_dpwssd_epi32(whole[r][0], _mm512_set1_epi32(two_at(r, c)), own);
    if ((c += 2) >= deep) break;
    own = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(codes += 2 * LANES)));
    for (int r = 0; r < ROWS; r++) whole[r][1] = _mm512_dpwssd_epi32(whole[r][1], _mm512_set1_epi32(two_at(r, c)), own);
  }
  for (int r = 0; r < ROWS; r++) {
    __m512i both = _mm512_add_epi32(whole[r][0], whole[r][1]);
    sums[r][0] = _mm512_castsi512_si256(both), sums[r][1] = _mm512_extracti64x4_epi64(both, 1);
  }
#else
  for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
  for (long c = 0; c < deep; c += 2, codes += 2 * LANES) {
    __builtin_prefetch(codes + 2048, 0, 2);
    __m256i lower = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes));
    __m256i upper = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(codes + LANES)));
    for (int r = 0; r < ROWS; r++) {
      __m256i both = _mm256_set1_epi32(two_at(r, c));
      sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(both, lower));
      sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(both, upper));
    }
  }
#endif
}
static inline float most_of(__m256 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
static void panel_noise(const Sampling& sampling, long row, long panel, float* out) {
  int64_t ids[LANES];
  for (int i = 0; i < LANES; i++) ids[i] = panel * LANES + i;
  store(out, gumbel(noise_key(sampling.seeds[row], sampling.positions[row]), ids));
}
// Of a row and a panel, by its sums: the least that the largest of its scores can be, and the most; of a row that filters, of its logits.
static inline void row_bounds(const CoarseHead& head, const CoarseRows& rows, long row, long panel, const __m256i sums[2], float& least, float& most) {
  bool filters = rows.filters[row];
  float temperature = rows.sampling.temperature && !filters ? rows.sampling.temperature[row] : 0.0f, noise[LANES];
  if (temperature != 0.0f) panel_noise(rows.sampling, row, panel, noise);
  __m256 of_least = _mm256_set1_ps(-INFINITY), of_most = of_least;
  for (int half = 0; half < 2; half++) {
    long first = panel * LANES + half * 8;
    __m256 steps = _mm256_mul_ps(_mm256_loadu_ps(head.steps + first), _mm256_set1_ps(rows.steps[row]));
    __m256 about = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[half]), steps);
    __m256 off = _mm256_mul_ps(_mm256_loadu_ps(head.errors + first), _mm256_set1_ps(rows.norms[row]));
    off = _mm256_fmadd_ps(_mm256_loadu_ps(head.norms + first), _mm256_set1_ps(rows.errors[row]), off);
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    // A logit is off by its rounding too.
    const __m256 rounding = _mm256_set1_ps(rows.rounding + 1e-6f);
    if (temperature != 0.0f || filters) off = _mm256_fmadd_ps(_mm256_add_ps(_mm256_and_ps(about, no_sign), off), rounding, off);
    if (temperature != 0.0f) {
      // And a score by those of its quotient and of the sum.
      __m256 by = _mm256_set1_ps(1.0f / temperature), added = _mm256_loadu_ps(noise + half * 8);
      off = _mm256_fmadd_ps(_mm256_and_ps(added, no_sign), _mm256_set1_ps(1e-6f), _mm256_mul_ps(off, by));
      about = _mm256_fmadd_ps(about, by, added);
    }
    __m256 below = _mm256_sub_ps(about, off), above = _mm256_add_ps(about, off);
    if (first + 8 > head.n) {
      __m256 lane = _mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0), none = _mm256_cmp_ps(lane, _mm256_set1_ps(float(head.n - first)), _CMP_GE_OQ);
      below = _mm256_blendv_ps(below, _mm256_set1_ps(-INFINITY), none), above = _mm256_blendv_ps(above, _mm256_set1_ps(-INFINITY), none);
    }
    of_least = _mm256_max_ps(of_least, below), of_most = _mm256_max_ps(of_most, above);
  }
  least = most_of(of_least), most = most_of(of_most);
}
template <int ROWS>
static void panel_bounds(const CoarseHead& head, const CoarseRows& rows, long row, long panel, float* least, float* most) {
  __m256i sums[ROWS][2];
  panel_sums<ROWS>(head.codes + panel * LANES * rows.deep, rows.numbers.data() + row * rows.deep, rows.deep, sums);
  for (int r = 0; r < ROWS; r++) row_bounds(head, rows, row + r, panel, sums[r], least[r], most[r]);
}
#if defined(__AMX_INT8__)
// Rows for tiles, `[2][rows, up to 16][inputs, up to 64]`: a number is 256 times the first of its bytes, and the second. Zeros fill up.
struct ByteRows { long wide, rows; std::vector<int8_t> bytes; };
static ByteRows byte_rows(const CoarseRows& rows, long m) {
  ByteRows two{rounded_up(rows.deep, 64), rounded_up(m, 16), {}};
  two.bytes.assign(2 * two.rows * two.wide, 0);
  for (long r = 0; r < m; r++)
    for (long c = 0; c < rows.deep; c++) {
      int number = rows.numbers[r * rows.deep + c], upper = (number + 128) >> 8;
      two.bytes[r * two.wide + c] = int8_t(upper), two.bytes[(two.rows + r) * two.wide + c] = int8_t(number - upper * 256);
    }
  return two;
}
// Codes of a panel as tiles have them, `[wide / 4][16][4]`.
static inline void turn_codes(const int8_t* codes, long deep, long wide, int8_t* to) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (long c = 0; c < wide; c += 4) {
    __mmask16 words = c + 4 <= deep ? 0xffff : c < deep ? 0xff : 0;
    _mm512_storeu_si512(to + c * LANES, _mm512_permutexvar_epi16(order, _mm512_maskz_loadu_epi32(words, codes + c * LANES)));
  }
}
// As `panel_bounds`, of all rows and panels [first, last), with the same sums.
static void tile_bounds(const CoarseHead& head, const CoarseRows& rows, const ByteRows& two, long m, long first, long last, float* least, float* most) {
  int8_t* turned = (int8_t*)scratch(two.wide * LANES / 4 + 512);
  int32_t* sums = (int32_t*)(turned + two.wide * LANES);
  set_tiles(16, 16);
  for (long panel = first; panel < last; panel++) {
    turn_codes(head.codes + panel * LANES * rows.deep, rows.deep, two.wide, turned);
    const char* next = (const char*)(head.codes + (panel + 1) * LANES * rows.deep);  // the last one's is fetched, not read
    for (long row = 0; row < m; row += 16) {
      const int8_t *upper = two.bytes.data() + row * two.wide, *lower = upper + two.rows * two.wide;
      _tile_zero(0); _tile_zero(1);
      for (long c = 0; c < two.wide; c += 64) {
        for (long line = 0; row == 0 && line < 16; line++) fetch_line(next + c * LANES + line * 64);
        _tile_loadd(6, turned + c * LANES, 64);
        _tile_loadd(4, upper + c, two.wide); _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, lower + c, two.wide); _tile_dpbssd(1, 5, 6);
      }
      _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
      for (long r = 0; r < std::min<long>(16, m - row); r++) {
        __m512i both = _mm512_add_epi32(_mm512_slli_epi32(_mm512_loadu_si512(sums + r * LANES), 8), _mm512_loadu_si512(sums + 256 + r * LANES));
        __m256i halves[2] = {_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1)};
        row_bounds(head, rows, row + r, panel, halves, least[panel * m + row + r], most[panel * m + row + r]);
      }
    }
  }
  free_tiles();
}
#endif
// The least that a logit may have which a row's filters keep, by the least that the largest of each panel can be, `step` apart, and of
// all; -infinity where they keep any, or top-p has to know what all weigh.
static float kept_from(const Sampling& sampling, long row, long vocab, const float* least, long panels, long step, float least_top) {
  float from = sampling.min_p[row] > 0.0f ? min_p_edge(least_top, sampling.temperature[row], sampling.min_p[row]) : -INFINITY;
  if (!sampling.by_rank(row, vocab) || sampling.top_k[row] > panels) return from;
  std::vector<float> ordered(panels);  // top_k of them have a logit that is not below the last
  for (long i = 0; i < panels; i++) ordered[i] = least[i * step];
  auto last = ordered.begin() + sampling.top_k[row] - 1;
  std::nth_element(ordered.begin(), last, ordered.end(), std::greater<float>());
  return std::max(from, *last);
}
// From which logit on a row keeps them, of `some`, among which are all that top-k or min-p keep. Twice, since the weights that top-p sums
// are rounded: the lowest that it may be, and from which on all certainly are kept.
static void kept_edges(const Sampling& sampling, long row, long vocab, std::vector<Weighed> some, float& may_be, float& is) {
  float top = -INFINITY, temperature = sampling.temperature[row], top_p = sampling.top_p[row];
  for (const Weighed& each : some) top = std::max(top, each.logit);
  may_be = is = sampling.min_p[row] > 0.0f ? min_p_edge(top, temperature, sampling.min_p[row]) : -INFINITY;
  if (sampling.by_rank(row, vocab)) may_be = is = std::max(is, last_within(some, double(sampling.top_k[row])));
  if (!(top_p < 1.0f)) return;
  double total = 0.0;
  for (Weighed& each : some) total += each.weight = each.logit >= is ? std::exp((each.logit - top) / temperature) : 0.0f;
  may_be = std::max(may_be, last_within(some, double(top_p) * total * (1 + 1e-5)));
  is = std::max(is, last_within(some, double(top_p) * total * (1 - 1e-5)));
}
// The outputs of `unit` that a row may have to compute.
struct Candidate { long row, unit; float best; int64_t place; };

// Of each row the least and the most that the largest score of each panel can be, `[panels][rows]`.
static void all_bounds(const CoarseHead& head, const CoarseRows& rows, long m, int threads, float* least, float* most) {
  long panels = rounded_up(head.n, LANES) / LANES;
#if defined(__AMX_INT8__)
  if (has_byte_tiles && m > COARSE_ROWS) {
    ByteRows two = byte_rows(rows, m);
    return share(threads, panels, 16, [&](long first, long last) { tile_bounds(head, rows, two, m, first, last, least, most); });
  }
#endif
  share(threads, panels, 16, [&](long first, long last) {
    for (long panel = first; panel < last; panel++)
      for (long row = 0; row < m;) {
        long passes = (m - row + COARSE_ROWS - 1) / COARSE_ROWS, now = (m - row + passes - 1) / passes;
        float *low = least + panel * m + row, *high = most + panel * m + row;
        switch (now) {
          case 1: panel_bounds<1>(head, rows, row, panel, low, high); break;
          case 2: panel_bounds<2>(head, rows, row, panel, low, high); break;
          case 3: panel_bounds<3>(head, rows, row, panel, low, high); break;
          default: panel_bounds<COARSE_ROWS>(head, rows, row, panel, low, high);
        }
        row += now;
      }
  });
}
// The logits of a unit for a row.
template <class T> static long unit_logits(const Product& p, const Candidate& each, long of_unit, T* logits) {
  long begin = each.unit * of_unit, count = std::min(of_unit, p.n - begin);
  const char* numbers = (const char*)p.weight->numbers + each.unit * packed_bytes(p.weight->kind, of_unit, p.k);
  Weight part{p.weight->kind, count, p.k, numbers, nullptr, 0};
  Product own{(const T*)p.x + each.row * p.x_step, &part, nullptr, logits, 1, count, p.k, p.x_step};
  if constexpr (std::is_same<T, float>::value) linear_float(own, 1);
  else linear_bf16(own, 1);
  return count;
}
// The best score of a unit's logits, and its output. lowest: that a row which filters keeps.
template <class T>
static void best_of_unit(const Sampling& sampling, const T* logits, long begin, long count, const float* lowest, Candidate& each) {
  int64_t tokens[VECTORS * LANES], place = 0;
  for (long j = 0; j < count; j++) tokens[j] = begin + j;
  Choice choice{logits, 1, count, count, sampling.temperature, sampling.seeds, sampling.positions, lowest, tokens};
  if (sampling.temperature) choice.temperature += each.row, choice.seeds += each.row, choice.positions += each.row;
  best_of<T>(choice, 0, 0, count, each.best, place);
  each.place = begin + place;
}
// Lets the candidates of a row that filters choose, by their logits, `of_unit` of each. Returns whether the row certainly keeps the best.
template <class T>
static bool choose_filtered(const Sampling& sampling, long vocab, long of_unit, const T* logits, Candidate* first, Candidate* last) {
  std::vector<Weighed> some;
  auto count = [&](const Candidate& each) { return std::min(of_unit, vocab - each.unit * of_unit); };
  for (const Candidate* each = first; each < last; each++)
    for (long j = 0; j < count(*each); j++) some.push_back({to_float(logits[(each - first) * of_unit + j]), 1.0f});
  float may_be, is, best = -INFINITY, chosen = -INFINITY;
  kept_edges(sampling, first->row, vocab, std::move(some), may_be, is);
  for (Candidate* each = first; each < last; each++) {
    const T* own = logits + (each - first) * of_unit;
    best_of_unit<T>(sampling, own, each->unit * of_unit, count(*each), &may_be, *each);
    if (each->best > best) best = each->best, chosen = to_float(own[each->place - each->unit * of_unit]);
  }
  return chosen >= is;
}

// ids: of each row of x what `choose` gives for its logits with what `lowest_kept` keeps. Returns how many units of the head were
// computed, of rows * units. Without ids -1 where too many would be, a sum's rounding decides, or rows are not finite, and -2 where a row
// has top-p alone, which has to know what all logits weigh.
template <class T> static int64_t likeliest(const Product& p, const CoarseHead& head, const Sampling& sampling, int threads, int64_t* ids) {
  CoarseRows rows{sampling};
  long panels = rounded_up(head.n, LANES) / LANES, m = p.m;
  long of_unit = p.weight->kind == FLOATS ? LANES : outputs_together(p.weight->kind);
  for (long row = 0; row < m; row++) {
    rows.filters.push_back(sampling.filters(row, head.n));
    if (rows.filters[row] && !sampling.by_rank(row, head.n) && !(sampling.min_p[row] > 0.0f)) return -2;
  }
  if (!coarse_rows<T>(p, rows)) return -1;
  float *least = scratch(2 * panels * m, BETWEEN), *most = least + panels * m;
  all_bounds(head, rows, m, threads, least, most);
  std::vector<float> lowest(m, -INFINITY);
  for (long panel = 0; panel < panels; panel++)
    for (long row = 0; row < m; row++) lowest[row] = std::max(lowest[row], least[panel * m + row]);
  share(threads, m, 1, [&](long first, long last) {
    for (long row = first; row < last; row++) {
      if (rows.filters[row]) lowest[row] = kept_from(sampling, row, head.n, least + row, panels, m, lowest[row]);
      // Two logits that differ by less may be rounded to one number.
      else lowest[row] -= std::fabs(lowest[row]) * rows.rounding * 4;
    }
  });
  std::vector<Candidate> candidates;
  std::vector<long> begins;  // of each row, and behind the last
  long together = of_unit / LANES, units = (panels + together - 1) / together;
  for (long row = 0; row < m; row++) {
    begins.push_back(long(candidates.size()));
    for (long unit = 0; unit < units; unit++) {
      bool may_be = false;
      for (long panel = unit * together; panel < std::min(panels, (unit + 1) * together); panel++)
        may_be |= most[panel * m + row] >= lowest[row];
      if (may_be) candidates.push_back(Candidate{row, unit, 0.0f, 0});
    }
  }
  begins.push_back(long(candidates.size()));
  if (begins[m] * FEW_OF > units * std::max(m, 2L)) return -1;
  std::vector<T> logits(sampling.temperature ? begins[m] * of_unit : 0);  // of rows that filter
  share(threads, begins[m], 1, [&](long first, long last) {
    for (long i = first; i < last; i++) {
      Candidate& each = candidates[i];
      T own[VECTORS * LANES], *out = rows.filters[each.row] ? logits.data() + i * of_unit : own;
      long count = unit_logits<T>(p, each, of_unit, out);
      if (out == own) best_of_unit<T>(sampling, own, each.unit * of_unit, count, nullptr, each);
    }
  });
  std::atomic<bool> is_certain{true};
  share(threads, m, 1, [&](long first, long last) {
    for (long row = first; row < last; row++)
      if (rows.filters[row] && !choose_filtered<T>(sampling, head.n, of_unit, logits.data() + begins[row] * of_unit,
                                                   candidates.data() + begins[row], candidates.data() + begins[row + 1]))
        is_certain = false;
  });
  if (!is_certain) return -1;
  std::vector<float> best(m, -INFINITY);
  for (long row = 0; row < m; row++) ids[row] = 0;
  for (const Candidate& each : candidates)
    if (each.best > best[each.row]) best[each.row] = each.best, ids[each.row] = each.place;
  return int64_t(candidates.size());
}
#else
static int64_t coarse_rows_at_most(bool) { return 0; }
template <class T> static int64_t likeliest(const Product&, const CoarseHead&, const Sampling&, int, int64_t*) { return -1; }
#endif

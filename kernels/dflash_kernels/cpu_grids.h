// Weights whose numbers lie on grids, kept in fewer bits than bfloat16 takes, as files in Q4_0, Q4_1 and Q8_0 of GGUF have
// them: of 32 inputs of an output a number is `code * step + least`, in float32, then rounded to bfloat16. Codes have 4
// bits, or 8 with a sign and no `least`; both numbers of a grid are float16. Only what gives the very same numbers is kept
// so.

#pragma once

// A unit of a grid: the codes of 32 outputs and 32 inputs, then 32 steps, then 32 leasts where codes have 4 bits. Codes are
// words of eight outputs and even and odd inputs, 16 lanes: 4 or 8 inputs of a lane in a word, the first in the lowest
// bits.
constexpr long BITS_OF[] = {32, 16, 4, 8};
static long unit_bytes(int64_t kind) { return TILES * BITS_OF[kind] / 8 + PAIR * 2 * (kind == GRID4 ? 2 : 1); }

static inline float half_to_float(uint16_t bits) { _Float16 h; std::memcpy(&h, &bits, 2); return float(h); }
static inline uint16_t float_to_half(float x) { _Float16 h = _Float16(x); uint16_t bits; std::memcpy(&bits, &h, 2); return bits; }
// Where the code of an output and an input of a unit is: its word, and its lowest bit there.
static inline long word_of(int64_t kind, long out, long in, int& bit) {
  long per_word = 32 / BITS_OF[kind], at = in / 2, words = 16 / per_word;
  bit = int(at % per_word * BITS_OF[kind]);
  return (out / 8 * words + at / per_word) * LANES + out % 8 * 2 + in % 2;
}
static inline float number_at(const Weight& w, long row, long col) {
  const uint8_t* unit = (const uint8_t*)w.numbers + (row / PAIR * (w.k / DEEP) + col / DEEP) * unit_bytes(w.kind);
  const uint16_t* steps = (const uint16_t*)(unit + TILES * BITS_OF[w.kind] / 8);
  int bit;
  uint32_t word = ((const uint32_t*)unit)[word_of(w.kind, row % PAIR, col % DEEP, bit)] >> bit;
  float step = half_to_float(steps[row % PAIR]);
  return w.kind == GRID4 ? float(word & 15) * step + half_to_float(steps[PAIR + row % PAIR]) : float(int8_t(word)) * step;
}
// Eight numbers of float16, each twice.
static inline Floats twice(const uint16_t* p) {
#if defined(__AVX512F__)
  __m512i words = _mm512_cvtepu16_epi32(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)));
  __m512i both = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), words);
  return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(both));
#else
  Floats x;
  for (int i = 0; i < 8; i++) x[2 * i] = x[2 * i + 1] = half_to_float(p[i]);
  return x;
#endif
}
// The i-th of the codes of each lane.
template <int KIND> static inline Floats codes_of(Bits words, int i) {
  if constexpr (KIND == GRID8) return __builtin_convertvector((Ints)(words << (24 - 8 * i)) >> 24, Floats);
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Floats)_mm512_permutexvar_ps((__m512i)(words >> (4 * i)), values);
#else
  return __builtin_convertvector((Ints)((words >> (4 * i)) & 15), Floats);
#endif
}
// 16 outputs of two inputs each, as they lie side by side in a tile.
static inline void store_row(bf16* to, Floats lower, Floats upper) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)upper, (__m512)lower));
#else
  store(to, lower);
  store(to + LANES, upper);
#endif
}
template <int KIND> static void unpack(const uint8_t* from, bf16* out) {
  constexpr int CODES = 32 / (KIND == GRID4 ? 4 : 8), WORDS = 16 / CODES;  // of a lane in a word, and words of eight outputs
  const uint32_t* words = (const uint32_t*)from;
  const uint16_t* steps = (const uint16_t*)(words + 4 * WORDS * LANES);
  for (long half = 0; half < 2; half++) {
    Floats step[2], least[2];
    for (int i = 0; i < 2; i++) {
      step[i] = twice(steps + half * LANES + i * 8);
      least[i] = KIND == GRID4 ? twice(steps + PAIR + half * LANES + i * 8) : Floats{};
    }
    for (int word = 0; word < WORDS; word++) {
      Bits lower = *(const Bits*)(words + (half * 2 * WORDS + word) * LANES);
      Bits upper = *(const Bits*)(words + ((half * 2 + 1) * WORDS + word) * LANES);
#pragma GCC unroll 8
      for (int i = 0; i < CODES; i++) {
        Floats x = codes_of<KIND>(lower, i) * step[0] + least[0], y = codes_of<KIND>(upper, i) * step[1] + least[1];
        store_row(out + half * (TILES / 2) + (word * CODES + i) * PAIR, x, y);
      }
    }
  }
}
// A unit as a pair of tiles. Those that follow are fetched meanwhile.
static void unpack_unit(const Weight& w, long unit, bf16* out) {
  const uint8_t* from = (const uint8_t*)w.numbers + unit * unit_bytes(w.kind);
  for (long line = 0; line < unit_bytes(w.kind); line += 64) __builtin_prefetch(from + 4096 + line);
  if (w.kind == GRID4) unpack<GRID4>(from, out); else unpack<GRID8>(from, out);
}
// The codes and the grid of 32 numbers; false where they are on none.
static bool find_codes(int64_t kind, const float* w, int* codes, uint16_t& step, uint16_t& least) {
  float low = w[0], high = w[0], most = 0;
  for (int i = 0; i < DEEP; i++) low = std::min(low, w[i]), high = std::max(high, w[i]), most = std::max(most, std::fabs(w[i]));
  auto fits = [&](float by, float from, float lowest, float highest) {
    float inverse = by != 0 ? 1.0f / by : 0.0f;
    for (int i = 0; i < DEEP; i++) {
      float code = std::nearbyint((w[i] - from) * inverse);
      if (!(code >= lowest && code <= highest) || code * by + from != w[i]) return false;
      codes[i] = int(code);
    }
    return true;
  };
  if (kind == GRID8) {
    least = 0;
    for (int top = most > 0 ? 128 : 1; top; top--) {
      step = float_to_half(most / float(top));
      if (fits(half_to_float(step), 0.0f, -128.0f, 127.0f)) return true;
    }
    return false;
  }
  for (int top = high > low ? 15 : 1; top; top--)
    for (bool down : {false, true}) {  // steps of Q4_0 may be below 0
      step = float_to_half((down ? low - high : high - low) / float(top));
      for (int first = 0; first <= 15 - top; first++) {
        least = float_to_half((down ? high : low) - float(first) * half_to_float(step));
        if (fits(half_to_float(step), half_to_float(least), 0.0f, 15.0f)) return true;
      }
    }
  return false;
}
// Returns whether all numbers of w are on grids.
static bool pack_grid(int64_t kind, const float* w, long n, long k, uint8_t* out, int threads) {
  if (k % DEEP) return false;
  std::memset(out, 0, packed_bytes(kind, n, k));
  std::atomic<bool> all{true};
  share(threads, rounded_up(n, PAIR) / PAIR, 1, [&](long first, long last) {
    for (long row = first * PAIR; row < std::min(n, last * PAIR); row++)
      for (long col = 0; col < k && all.load(std::memory_order_relaxed); col += DEEP) {
        int codes[DEEP], bit;
        uint8_t* unit = out + (row / PAIR * (k / DEEP) + col / DEEP) * unit_bytes(kind);
        uint16_t* steps = (uint16_t*)(unit + TILES * BITS_OF[kind] / 8) + row % PAIR;
        uint16_t least;
        if (!find_codes(kind, w + row * k + col, codes, steps[0], least)) { all.store(false); return; }
        if (kind == GRID4) steps[PAIR] = least;
        for (long i = 0; i < DEEP; i++) {
          long word = word_of(kind, row % PAIR, i, bit);
          ((uint32_t*)unit)[word] |= (uint32_t(codes[i]) & ((1u << BITS_OF[kind]) - 1)) << bit;
        }
      }
  });
  return all.load();
}

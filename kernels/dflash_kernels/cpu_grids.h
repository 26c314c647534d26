// Weights whose numbers lie on grids, kept in fewer bits than numbers take: those of GGUF's quantised types. A number is
// `code * step + least`, in float32, and rounded where pairs of bfloat16 are multiplied; step and least are those of 32 inputs of an
// output, or of 16.

#pragma once

// How the numbers of a kind lie. bits: of a code; those of 8 bits have a sign. inputs: that share a step. number_bytes: of a
// step and of a least, 2 for float16, 4 for float32.
struct Grid { long bits, inputs, number_bytes; bool has_leasts; };
constexpr Grid GRIDS[] = {{4, 32, 2, true}, {8, 32, 2, false}, {4, 32, 4, true}, {8, 16, 4, true}};
static inline const Grid& grid_of(int64_t kind) { return GRIDS[(kind - GRID4) % 4]; }

// A unit: the codes of its outputs and 32 inputs; then, for each of the inputs that share them, steps and leasts.
// Codes are words of 16 lanes, 4 or 8 inputs of a lane in a word, the first in the lowest bits. A lane is one of 16 outputs;
// for pairs of bfloat16 it is one of eight, and its even or odd inputs.
static inline long code_bytes(int64_t kind) { return outputs_of_unit(kind) * DEEP * grid_of(kind).bits / 8; }
static inline long group_bytes(int64_t kind) {
  const Grid& grid = grid_of(kind);
  return outputs_of_unit(kind) * grid.number_bytes * (grid.has_leasts ? 2 : 1);
}
static long unit_bytes(int64_t kind) { return code_bytes(kind) + group_bytes(kind) * (DEEP / grid_of(kind).inputs); }

static inline float half_to_float(uint16_t bits) { _Float16 h; std::memcpy(&h, &bits, 2); return float(h); }
static inline uint16_t float_to_half(float x) { _Float16 h = _Float16(x); uint16_t bits; std::memcpy(&bits, &h, 2); return bits; }
static inline float half_at(const uint8_t* p) { uint16_t bits; std::memcpy(&bits, p, 2); return half_to_float(bits); }
// Where the code of an output and an input of a unit is: its word, and its lowest bit there.
static inline long word_of(int64_t kind, long out, long in, int& bit) {
  long bits = grid_of(kind).bits, per_word = 32 / bits, at = is_in_pairs(kind) ? in / 2 : in, words = 16 / per_word;
  bit = int(at % per_word * bits);
  if (!is_in_pairs(kind)) return at / per_word * LANES + out;
  return (out / 8 * words + at / per_word) * LANES + out % 8 * 2 + in % 2;
}
static inline uint8_t* unit_of(const Weight& w, long row, long col) {
  long outputs = outputs_of_unit(w.kind), together = outputs_together(w.kind) / outputs;
  long unit = (row / outputs / together * (w.k / DEEP) + col / DEEP) * together + row / outputs % together;
  return (uint8_t*)w.numbers + unit * unit_bytes(w.kind);
}
// The place of the step of an output and an input of a unit; its least is `outputs_of_unit` numbers on.
static inline uint8_t* step_of(const Weight& w, uint8_t* unit, long row, long col) {
  const Grid& grid = grid_of(w.kind);
  return unit + code_bytes(w.kind) + col % DEEP / grid.inputs * group_bytes(w.kind) + row % outputs_of_unit(w.kind) * grid.number_bytes;
}
static inline float number_at(const Weight& w, long row, long col) {
  const Grid& grid = grid_of(w.kind);
  uint8_t *unit = unit_of(w, row, col), *at = step_of(w, unit, row, col);
  auto read = [&](const uint8_t* p) { float x; std::memcpy(&x, p, 4 * (grid.number_bytes == 4)); return grid.number_bytes == 4 ? x : half_at(p); };
  int bit;
  uint32_t word = ((const uint32_t*)unit)[word_of(w.kind, row % outputs_of_unit(w.kind), col % DEEP, bit)] >> bit;
  float least = grid.has_leasts ? read(at + outputs_of_unit(w.kind) * grid.number_bytes) : 0.0f;
  return float(grid.bits == 4 ? int(word & 15) : int(int8_t(word))) * read(at) + least;
}
// 16 steps or leasts.
template <int BYTES> static inline Floats widened(const uint8_t* p) {
  if constexpr (BYTES == 4) return load((const float*)p);
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return {(Floats::Half)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), (Floats::Half)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16)))};
#else
  float x[LANES];
  for (int i = 0; i < LANES; i++) x[i] = half_at(p + 2 * i);
  return load(x);
#endif
}
// The i-th of the codes of each lane.
template <int BITS> static inline Floats codes_of(Bits words, int i) {
  if constexpr (BITS == 8) return converted<Floats>((Ints)(words << (24 - 8 * i)) >> 24);
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Floats)_mm512_permutexvar_ps((__m512i)(words >> (4 * i)), values);
#else
  return converted<Floats>((Ints)((words >> (4 * i)) & 15));
#endif
}
#if HAS_PAIRS
// Eight steps or leasts, each twice.
template <int BYTES> static inline Floats twice(const uint8_t* p) {
  const __m512i pairs = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  __m256 eight;
  if constexpr (BYTES == 4) eight = _mm256_loadu_ps((const float*)p);
  else eight = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
  return (Floats)_mm512_permutexvar_ps(pairs, _mm512_castps256_ps512(eight));
}
// A unit of bfloat16 as a pair of tiles. GRID: its place in `GRIDS`.
template <int GRID> static void unpack(const uint8_t* from, bf16* out) {
  constexpr Grid G = GRIDS[GRID];
  constexpr int CODES = 32 / G.bits, WORDS = 16 / CODES;  // of a lane in a word, and words of eight outputs
  constexpr long NUMBERS = PAIR * G.number_bytes, GROUP = NUMBERS * (G.has_leasts ? 2 : 1);
  const uint32_t* words = (const uint32_t*)from;
  const uint8_t* steps = (const uint8_t*)(words + 4 * WORDS * LANES);
  for (long half = 0; half < 2; half++) {
    Floats step[2], least[2]{};
    for (int word = 0; word < WORDS; word++) {
      if (word % (WORDS * G.inputs / DEEP) == 0)
        for (int i = 0; i < 2; i++) {
          const uint8_t* at = steps + word / (WORDS * G.inputs / DEEP) * GROUP + (half * LANES + i * 8) * G.number_bytes;
          step[i] = twice<G.number_bytes>(at);
          if constexpr (G.has_leasts) least[i] = twice<G.number_bytes>(at + NUMBERS);
        }
      Bits lower = vector_at<Bits>(words + (half * 2 * WORDS + word) * LANES);
      Bits upper = vector_at<Bits>(words + ((half * 2 + 1) * WORDS + word) * LANES);
#pragma GCC unroll 8
      for (int i = 0; i < CODES; i++) {
        Floats x = codes_of<G.bits>(lower, i) * step[0] + least[0], y = codes_of<G.bits>(upper, i) * step[1] + least[1];
        _mm512_storeu_si512(out + half * (TILES / 2) + (word * CODES + i) * PAIR, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
      }
    }
  }
}
#endif
// A unit of float32 as 32 inputs of a panel.
template <int GRID> static void unpack(const uint8_t* from, float* out) {
  constexpr Grid G = GRIDS[GRID];
  constexpr int CODES = 32 / G.bits, WORDS = DEEP / CODES, RUN = WORDS * G.inputs / DEEP;  // words that share their steps
  constexpr long NUMBERS = LANES * G.number_bytes, GROUP = NUMBERS * (G.has_leasts ? 2 : 1);
  const uint32_t* words = (const uint32_t*)from;
  const uint8_t* steps = (const uint8_t*)(words + WORDS * LANES);
  for (int group = 0; group < WORDS / RUN; group++, steps += GROUP) {
    Floats step = widened<G.number_bytes>(steps), least{};
    if constexpr (G.has_leasts) least = widened<G.number_bytes>(steps + NUMBERS);
    for (int word = group * RUN; word < (group + 1) * RUN; word++) {
      Bits codes = vector_at<Bits>(words + word * LANES);
#pragma GCC unroll 8
      for (int i = 0; i < CODES; i++) store(out + (word * CODES + i) * LANES, codes_of<G.bits>(codes, i) * step + least);
    }
  }
}
// What is read so many bytes later is fetched meanwhile: more where several units are read side by side.
constexpr long FETCHED_BYTES = 2048, FETCHED_SIDE_BY_SIDE = 4096;
static inline void fetch_after(const Weight& w, const uint8_t* unit, long bytes) {
  for (long line = 0; line < unit_bytes(w.kind); line += 64) __builtin_prefetch(unit + bytes + line);
}
template <class T> static void unpack_unit(const Weight& w, const uint8_t* from, T* out) {
  fetch_after(w, from, FETCHED_BYTES);
  switch ((w.kind - GRID4) % 4) {
    case 0: return unpack<0>(from, out);
    case 1: return unpack<1>(from, out);
    case 2: return unpack<2>(from, out);
    default: return unpack<3>(from, out);
  }
}

// GGUF's types, in the order of `cpu_ops.BLOCKS`: numbers and bytes of a block.
enum Type { Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K };
constexpr struct { long numbers, bytes; } BLOCKS[] = {{32, 18}, {32, 20}, {32, 34}, {256, 144}, {256, 176}, {256, 210}};
// 32 numbers of a row: their codes, and the steps and leasts of the first 16 and of the others.
struct Codes { int code[32]; float step[2], least[2]; };
static void read_scales(const uint8_t* block, long part, float& step, float& least) {  // of Q4_K and Q5_K
  const uint8_t* s = block + 4;
  int scale = part < 4 ? s[part] & 63 : (s[part + 4] & 15) | s[part - 4] >> 6 << 4;
  int low = part < 4 ? s[part + 4] & 63 : s[part + 4] >> 4 | s[part] >> 6 << 4;
  step = half_at(block) * float(scale);
  least = -(half_at(block + 2) * float(low));
}
// Numbers [32 * part, 32 * part + 32) of a block.
static Codes read_codes(int type, const uint8_t* block, long part) {
  Codes c{};
  float step = half_at(block), least = 0.0f;
  if (type == Q4_0 || type == Q4_1) {
    const uint8_t* codes = block + (type == Q4_0 ? 2 : 4);
    least = type == Q4_0 ? -8.0f * step : half_at(block + 2);
    for (int i = 0; i < 32; i++) c.code[i] = i < 16 ? codes[i] & 15 : codes[i - 16] >> 4;
  } else if (type == Q8_0) {
    for (int i = 0; i < 32; i++) c.code[i] = int8_t(block[2 + i]);
  } else if (type == Q6_K) {
    long half = part / 4, quarter = part % 4;
    const uint8_t *low = block + 64 * half + quarter % 2 * 32, *high = block + 128 + 32 * half;
    const int8_t* scales = (const int8_t*)block + 192 + 8 * half + 2 * quarter;
    for (int i = 0; i < 32; i++) c.code[i] = ((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * quarter) & 3) << 4) - 32;
    for (int i = 0; i < 2; i++) c.step[i] = half_at(block + 208) * float(scales[i]);
    return c;
  } else {
    const uint8_t *high = block + 16, *codes = block + (type == Q4_K ? 16 : 48) + part / 2 * 32;
    read_scales(block, part, step, least);
    for (int i = 0; i < 32; i++) {
      c.code[i] = part % 2 ? codes[i] >> 4 : codes[i] & 15;
      if (type == Q5_K) c.code[i] |= (high[i] >> part & 1) << 4;
    }
  }
  for (int i = 0; i < 2; i++) c.step[i] = step, c.least[i] = least;
  return c;
}
// Whether a step or a least could be kept as the grid has it.
static bool write_number(const Grid& grid, float x, uint8_t* to) {
  if (!std::isfinite(x)) return false;
  uint16_t half = float_to_half(x);
  if (grid.number_bytes == 4) std::memcpy(to, &x, 4); else std::memcpy(to, &half, 2);
  return grid.number_bytes == 4 || half_to_float(half) == x;
}
// Writes `rows` rows of blocks as those of w from `first` on, whose memory has zeros. Returns whether all could be kept.
static bool pack_blocks(const Weight& w, int type, const uint8_t* raw, long first, long rows, int threads) {
  const Grid& grid = grid_of(w.kind);
  long outputs = outputs_of_unit(w.kind), row_bytes = w.k / BLOCKS[type].numbers * BLOCKS[type].bytes, begin = first / outputs;
  std::atomic<bool> all{true};
  share(threads, rounded_up(first + rows, outputs) / outputs - begin, 1, [&](long from, long to) {
    for (long row = std::max(first, (begin + from) * outputs); row < std::min(first + rows, (begin + to) * outputs); row++)
      for (long col = 0; col < w.k && all.load(std::memory_order_relaxed); col += DEEP) {
        const uint8_t* block = raw + (row - first) * row_bytes + col / BLOCKS[type].numbers * BLOCKS[type].bytes;
        Codes c = read_codes(type, block, col % BLOCKS[type].numbers / DEEP);
        uint8_t* unit = unit_of(w, row, col);
        for (long group = 0; group < DEEP / grid.inputs; group++) {
          uint8_t* at = step_of(w, unit, row, col + group * grid.inputs);
          bool kept = write_number(grid, c.step[group], at);
          if (grid.has_leasts) kept &= write_number(grid, c.least[group], at + outputs * grid.number_bytes);
          if (!kept) all.store(false);
        }
        for (long i = 0; i < DEEP; i++) {
          int bit;
          long word = word_of(w.kind, row % outputs, i, bit);
          ((uint32_t*)unit)[word] |= (uint32_t(c.code[i]) & ((1u << grid.bits) - 1)) << bit;
        }
      }
  });
  return all.load();
}

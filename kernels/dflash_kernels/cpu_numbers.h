// Numbers and vectors of a CPU's operations, the threads that share an operation, and their memory.

#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Vectors of 16 lanes, and of their halves. Registers of 64 bytes hold one; else it is two parts, and each of them again two until a
// register holds it: GCC keeps in memory what it cannot keep in one register.
#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif
template <class E, int BYTES> struct Parts;
template <class E, int BYTES, bool IS_HELD = BYTES <= REGISTER_BYTES> struct VectorOf { typedef Parts<E, BYTES> type; };
template <class E, int BYTES> struct VectorOf<E, BYTES, true> { typedef E type __attribute__((vector_size(BYTES), aligned(sizeof(E)), may_alias)); };
template <class E, int BYTES = 64> using Vector = typename VectorOf<E, BYTES>::type;

#define FOR_PARTS(op) \
  friend Parts operator op(Parts a, Parts b) { return {a.lower op b.lower, a.upper op b.upper}; } \
  Parts& operator op##=(Parts b) { return *this = *this op b; }
#define COMPARE_PARTS(op) \
  friend Mask operator op(Parts a, Parts b) { return {(MaskHalf)(a.lower op b.lower), (MaskHalf)(a.upper op b.upper)}; }
template <class E, int BYTES> struct Parts {
  typedef Vector<E, BYTES / 2> Half;
  typedef Vector<int32_t, BYTES> Mask;
  typedef Vector<int32_t, BYTES / 2> MaskHalf;
  Half lower, upper;
  Parts() = default;
  Parts(Half lower, Half upper) : lower(lower), upper(upper) {}
  Parts(E x) : lower(x - Half{}), upper(x - Half{}) {}
  template <class F> explicit Parts(Parts<F, BYTES> bits) : lower((Half)bits.lower), upper((Half)bits.upper) {}
  FOR_PARTS(+) FOR_PARTS(-) FOR_PARTS(*) FOR_PARTS(/) FOR_PARTS(&) FOR_PARTS(|) FOR_PARTS(^)
  COMPARE_PARTS(<) COMPARE_PARTS(>) COMPARE_PARTS(>=) COMPARE_PARTS(==) COMPARE_PARTS(!=)
  friend Parts operator-(Parts a) { return {-a.lower, -a.upper}; }
  friend Parts operator<<(Parts a, int bits) { return {a.lower << bits, a.upper << bits}; }
  friend Parts operator>>(Parts a, int bits) { return {a.lower >> bits, a.upper >> bits}; }
  E operator[](int i) const { return i < int(BYTES / 2 / sizeof(E)) ? lower[i] : upper[i - int(BYTES / 2 / sizeof(E))]; }
};
#undef FOR_PARTS
#undef COMPARE_PARTS

typedef Vector<float> Floats;
typedef Vector<int32_t> Ints;
typedef Vector<uint32_t> Bits;
typedef Vector<uint16_t, 32> Halves;
typedef Vector<uint64_t> Longs;

// A vector from memory and to it, whatever its alignment.
template <class V> static inline V vector_at(const void* p) {
  if constexpr (std::is_class<V>::value) return {vector_at<typename V::Half>(p), vector_at<typename V::Half>((const char*)p + sizeof(V) / 2)};
  else return *(const V*)p;
}
template <class V> static inline void put(void* p, V x) {
  if constexpr (std::is_class<V>::value) put(p, x.lower), put((char*)p + sizeof(V) / 2, x.upper);
  else *(V*)p = x;
}
// Lanes of `x` where `mask` is set, else of `y`.
template <class M, class V> static inline V select(M mask, V x, V y) {
  if constexpr (std::is_class<V>::value) return {select(mask.lower, x.lower, y.lower), select(mask.upper, x.upper, y.upper)};
  else return mask ? x : y;
}
// Each lane as a number of V's type: of a vector of as many bytes, or of 16 bits from memory.
template <class V, class From> static inline V converted(From x) {
  if constexpr (std::is_class<V>::value) return {converted<typename V::Half>(x.lower), converted<typename V::Half>(x.upper)};
  else return __builtin_convertvector(x, V);
}
template <class V> static inline V widened_at(const uint16_t* p) {
  if constexpr (std::is_class<V>::value) return {widened_at<typename V::Half>(p), widened_at<typename V::Half>(p + sizeof(V) / 8)};
  else return __builtin_convertvector(vector_at<Vector<uint16_t, sizeof(V) / 2>>(p), V);
}
template <class V> static inline void put_narrow(uint16_t* p, V x) {
  if constexpr (std::is_class<V>::value) put_narrow(p, x.lower), put_narrow(p + sizeof(V) / 8, x.upper);
  else put(p, __builtin_convertvector(x, Vector<uint16_t, sizeof(V) / 2>));
}
// 0, 1, 2 and so on.
static inline Ints lanes() {
  static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return vector_at<Ints>(numbers);
}

// Whether the processor sums products of pairs of bfloat16 in float32 (VDPBF16PS), which is what AMX's tiles do as well.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

// A number of bfloat16, and a byte of FP8 (e4m3), by their bits.
struct bf16 { uint16_t bits; };
struct fp8 { uint8_t bits; };

constexpr int LANES = 16;
constexpr int AT_ONCE = 6;           // rows of a product whose sums are kept in registers
constexpr int VECTORS = 4;           // and vectors of each
constexpr long DEPTH_AT_ONCE = 256;  // inputs of a product that are summed before they are added to those before: rounding grows with it
constexpr int POSITIONS = 64;        // of KV that attention takes at a time
constexpr int QUERY_ROWS = 64;       // queries times heads that share their KV
constexpr int SPINS = 1500;          // of a thread that waits for work, before it sleeps: about 0.1 ms

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) { uint32_t b = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &b, 4); return f; }
static inline float to_float(fp8 x) {
  uint16_t h = uint16_t(int16_t(int8_t(x.bits)) << 7) & uint16_t(~0x4000);
  _Float16 f; std::memcpy(&f, &h, 2);
  return float(f) * 256.0f;
}
static inline Floats load(const float* p) { return vector_at<Floats>(p); }
static inline Floats load(const bf16* p) { return (Floats)(widened_at<Bits>((const uint16_t*)p) << 16); }
static inline Floats load(const fp8* p) {
#if defined(__AVX512BW__)
  __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return (Floats)_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(int16_t(0xbfff)))) * 256.0f;
#elif defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
  __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  halves = _mm256_and_si256(halves, _mm256_set1_epi16(int16_t(0xbfff)));
  return Floats{(Floats::Half)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), (Floats::Half)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))} * 256.0f;
#endif
  float x[LANES];
  for (int i = 0; i < LANES; i++) x[i] = to_float(p[i]);
  return load(x);
}
static inline Floats all(float x) { return x - Floats{}; }
static inline void store(float* p, Floats x) { put(p, x); }
static inline void store(bf16* p, Floats x) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &h, 32);
#else
  Bits b = (Bits)x;
  b = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  b = select(x != x, Bits{} + 0x7fc0, b);
  put_narrow((uint16_t*)p, b);
#endif
}
template <class T> static inline void store_some(T* p, Floats x, int count) {
  if (count >= LANES) return store(p, x);
  T whole[LANES];
  store(whole, x);
  std::memcpy(p, whole, count * sizeof(T));
}
template <class T> static inline Floats load_some(const T* p, int count) {
  if (count >= LANES) return load(p);
  T whole[LANES] = {};
  std::memcpy(whole, p, count * sizeof(T));
  return load(whole);
}
// As a number of type T that is read again.
template <class T> static inline Floats rounded(Floats x) {
  if (std::is_same<T, float>::value) return x;
  bf16 h[LANES];
  store(h, x);
  return load(h);
}
// As it is, but the compiler makes no fused operation of it and the next one.
template <class V> static inline V rounded_by_itself(V x) {
  if constexpr (std::is_class<V>::value) return {rounded_by_itself(x.lower), rounded_by_itself(x.upper)};
#if defined(__x86_64__)
  else { asm("" : "+x"(x)); return x; }
#elif defined(__aarch64__)
  else { asm("" : "+w"(x)); return x; }
#else
  else { asm("" : "+m"(x)); return x; }
#endif
}
static inline bool any(Ints x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX__)
  __m256i both = (__m256i)x.lower | (__m256i)x.upper;
  return !_mm256_testz_si256(both, both);
#else
  int32_t lanes[LANES], found = 0;
  put(lanes, x);
  for (int i = 0; i < LANES; i++) found |= lanes[i];
  return found != 0;
#endif
}
static inline float sum(Floats x) {
  float s[LANES];
  store(s, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] += s[i + n];
  return s[0];
}
static inline float largest(Floats x) {
  float s[LANES];
  store(s, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] = s[i + n] > s[i] ? s[i + n] : s[i];
  return s[0];
}
static inline int32_t largest(Ints x) {
  int32_t s[LANES];
  put(s, x);
  return *std::max_element(s, s + LANES);
}
static inline Floats larger(Floats a, Floats b) { return select(a > b, a, b); }
static inline Floats vexp(Floats x) {  // Cephes; 0 below the smallest normal number
  Floats inside = larger(x, all(-87.0f));
  inside = select(inside > 88.7f, all(88.7f), inside);
  Floats t = inside * 1.44269504088896341f + 12582912.0f;
  Ints n = (Ints)t - 0x4b400000;
  t -= 12582912.0f;
  Floats r = inside - t * 0.693359375f + t * 2.12194440e-4f;
  Floats y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  y = (Floats)((Ints)y + (n << 23));
  y = select(x < -87.0f, Floats{}, y);
  return select(x != x, x, y);
}
// 2 to the power of x, which is at most 120; Cephes; 0 below the smallest normal number.
static inline Floats vexp2(Floats x) {
  Floats inside = larger(x, all(-126.0f));
  Floats t = inside + 12582912.0f, r = inside - (t - 12582912.0f), y = all(1.535336188319500e-4f);
  y = y * r + 1.339887440266574e-3f;
  y = y * r + 9.618437357674640e-3f;
  y = y * r + 5.550332471162809e-2f;
  y = y * r + 2.402264791363012e-1f;
  y = y * r + 6.931472028550421e-1f;
  y = y * r + 1.0f;
  y = (Floats)((Ints)y + ((Ints)t << 23));
  return select(x != x, x, select(x < -126.0f, Floats{}, y));
}
// What a gate lets through, rounded where the references round.
template <class T> static inline Floats gated(Floats gate, Floats up, bool is_gelu) {
  Floats turn = is_gelu ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  return rounded<T>(gate / (1.0f + vexp(-turn))) * up;
}

// Fetches a line of memory. Written as assembly, since GCC removes the calls of a function that does nothing but `__builtin_prefetch`.
static inline void fetch_line(const char* at) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 (%0)" : : "r"(at));
#else
  __builtin_prefetch(at);
#endif
}
// Into the second cache.
static inline void fetch_line_far(const char* at) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 (%0)" : : "r"(at));
#else
  __builtin_prefetch(at, 0, 2);
#endif
}
// Memory that a thread fetches while it waits for work, since the next operation reads it. A few lines at a time: what a
// core cannot take at once it drops.
struct Coming {
  static constexpr long BYTES = 320;
  const char *at = nullptr, *end = nullptr;
  // The next part of thread `index` of `threads` that wait. Returns whether one was left.
  bool fetch(int index, int threads) {
    const char* from = at + index * BYTES;
    if (from >= end) return false;
    for (long i = 0; i < BYTES; i += 64) __builtin_prefetch(from + i, 0, 2);
    at += BYTES * threads;
    return true;
  }
};
static thread_local Coming coming;

// Threads that share an operation.
class Pool {
  // Epoch, number of pieces, next piece: claimed together, so that a thread that comes late takes no piece of another
  // operation.
  std::atomic<uint64_t> ticket{0};
  std::atomic<uint32_t> done{0};
  std::atomic<int> sleepers{0};
  void (*work)(void*, int) = nullptr;
  void* argument = nullptr;
  std::mutex owner, sleep;
  std::condition_variable wake;
  int workers = 0;

  static bool open(uint64_t t) { return (t & 0xffff) < ((t >> 16) & 0xffff); }
  bool take() {
    uint64_t t = ticket.load(std::memory_order_acquire);
    if (!open(t)) return false;
    auto run = work;
    void* with = argument;
    if (!ticket.compare_exchange_strong(t, t + 1, std::memory_order_acq_rel)) return true;
    run(with, int(t & 0xffff));
    done.fetch_add(1, std::memory_order_release);
    return true;
  }
  void serve(int index) {
    for (int spins = 0;;) {
      if (take()) { spins = 0; continue; }
      bool fetches = coming.fetch(index, workers);
      relax();
      if (fetches || ++spins < SPINS) continue;
      std::unique_lock<std::mutex> lock(sleep);
      sleepers.fetch_add(1);
      wake.wait(lock, [this] { return open(ticket.load()); });
      sleepers.fetch_sub(1);
      spins = 0;
    }
  }

 public:
  void run(int threads, int pieces, void (*each)(void*, int), void* with) {
    if (threads > 1 && pieces > 1 && owner.try_lock()) {
      for (; workers < threads - 1; workers++) std::thread([this, index = workers] { serve(index); }).detach();
      work = each;
      argument = with;
      done.store(0, std::memory_order_relaxed);
      uint64_t epoch = (ticket.load(std::memory_order_relaxed) >> 32) + 1;
      ticket.store(epoch << 32 | uint64_t(pieces) << 16);
      if (sleepers.load()) {
        std::lock_guard<std::mutex> lock(sleep);
        wake.notify_all();
      }
      while (open(ticket.load(std::memory_order_acquire))) take();
      for (int spins = 0; done.load(std::memory_order_acquire) < uint32_t(pieces); spins++)
        if (spins < 2000) relax(); else std::this_thread::yield();
      owner.unlock();
      return;
    }
    for (int i = 0; i < pieces; i++) each(with, i);
  }
};
static Pool* pool = new Pool;  // its threads live as long as the process

// `each(first, last)` over pieces of [0, count), by this many threads.
template <class Each> static void share(int threads, long count, long least, const Each& each) {
  long pieces = threads <= 1 ? 1 : std::min<long>(threads * 8L, std::max<long>(1, count / std::max<long>(1, least)));
  struct Range { const Each* each; long count, pieces; } range{&each, count, pieces};
  pool->run(threads, int(pieces), [](void* with, int i) {
    auto* r = (Range*)with;
    (*r->each)(r->count * i / r->pieces, r->count * (i + 1) / r->pieces);
  }, &range);
}

// Memory of the calling thread: for a piece of an operation, for what all pieces read, and for what one operation of a call
// gives to the next.
enum Use { OF_PIECE, OF_ALL, BETWEEN };
static float* scratch(size_t count, Use use = OF_PIECE) {
  thread_local std::vector<float> kept[3];
  auto& memory = kept[use];
  if (memory.size() < count + LANES) memory.resize(count + LANES);
  return (float*)((uintptr_t(memory.data()) + 63) / 64 * 64);
}

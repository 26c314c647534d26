// The operations of a decoder on a CPU: products by weights that are laid out once, norms, gates, rotation with the
// write of KV, attention over KV blocks in place, and the choice of tokens. `cpu_ops.py` builds and calls them; each
// has a torch reference beside its Triton kernel.
//
// A row's result never depends on how many rows there are: sums run in one order for every number of rows and threads.
// Numbers are float32 or bfloat16; sums are float32, and results are rounded where the references round.

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>
#if defined(__AVX512F__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint64_t Longs __attribute__((vector_size(64), aligned(8), may_alias));

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

// ---- Numbers

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) { uint32_t b = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &b, 4); return f; }
static inline float to_float(fp8 x) {
  uint16_t h = uint16_t(int16_t(int8_t(x.bits)) << 7) & uint16_t(~0x4000);
  _Float16 f; std::memcpy(&f, &h, 2);
  return float(f) * 256.0f;
}
static inline Floats load(const float* p) { return *(const Floats*)p; }
static inline Floats load(const bf16* p) {
  Bits b = __builtin_convertvector(*(const Halves*)p, Bits) << 16;
  return (Floats)b;
}
static inline Floats load(const fp8* p) {
  Floats x;
  for (int i = 0; i < LANES; i++) x[i] = to_float(p[i]);
  return x;
}
static inline Floats all(float x) { return x - Floats{}; }
static inline void store(float* p, Floats x) { *(Floats*)p = x; }
static inline void store(bf16* p, Floats x) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &h, 32);
#else
  Bits b = (Bits)x;
  b = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  b = (x != x) ? (Bits{} + 0x7fc0) : b;
  *(Halves*)p = __builtin_convertvector(b, Halves);
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
static inline float sum(Floats x) {
  float s[LANES];
  store(s, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] += s[i + n];
  return s[0];
}
static inline float largest(Floats x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}
static inline Floats vexp(Floats x) {  // Cephes; 0 below the smallest normal number
  Floats inside = x < -87.0f ? all(-87.0f) : x;
  inside = inside > 88.7f ? all(88.7f) : inside;
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
  y = x < -87.0f ? Floats{} : y;
  return x != x ? x : y;
}

// ---- Threads that share an operation

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
  void serve() {
    for (int spins = 0;;) {
      if (take()) { spins = 0; continue; }
      relax();
      if (++spins < SPINS) continue;
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
      for (; workers < threads - 1; workers++) std::thread([this] { serve(); }).detach();
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

// ---- Products

// out[r][j] (+)= sum over k of a[r][k] * b[k][j], for ROWS rows and COLS vectors: rows of b lie `step` numbers apart, its
// vectors `apart`. Two numbers of bfloat16 lie side by side, those of neighbouring k.
template <int ROWS, int COLS, class B>
static void product(const float* a, long a_step, const B* b, long step, long apart, long count, bool add, float* out, long out_step) {
  Floats sums[ROWS][COLS];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < COLS; j++) sums[r][j] = add ? load(out + r * out_step + j * LANES) : Floats{};
  if constexpr (sizeof(B) == 4) {
    for (long k = 0; k < count; k++) {
      Floats column[COLS];
      for (int j = 0; j < COLS; j++) column[j] = load(b + k * step + j * apart);
      for (int r = 0; r < ROWS; r++) {
        Floats x = all(a[r * a_step + k]);
        for (int j = 0; j < COLS; j++) sums[r][j] += x * column[j];
      }
    }
  } else {
    for (long k = 0; k < count; k += 2) {
      Floats low[COLS], high[COLS];
      for (int j = 0; j < COLS; j++) {
        Bits pair = *(const Bits*)(b + k * step + j * apart);
        low[j] = (Floats)(pair << 16);
        high[j] = (Floats)(pair & 0xffff0000u);
      }
      for (int r = 0; r < ROWS; r++) {
        Floats x = all(a[r * a_step + k]), y = all(a[r * a_step + k + 1]);
        for (int j = 0; j < COLS; j++) { sums[r][j] += x * low[j]; sums[r][j] += y * high[j]; }
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < COLS; j++) store(out + r * out_step + j * LANES, sums[r][j]);
}
template <int COLS, class B>
static void product_rows(int rows, const float* a, long a_step, const B* b, long step, long apart, long count, bool add, float* out, long out_step) {
  switch (rows) {
    case 1: return product<1, COLS>(a, a_step, b, step, apart, count, add, out, out_step);
    case 2: return product<2, COLS>(a, a_step, b, step, apart, count, add, out, out_step);
    case 3: return product<3, COLS>(a, a_step, b, step, apart, count, add, out, out_step);
    case 4: return product<4, COLS>(a, a_step, b, step, apart, count, add, out, out_step);
    case 5: return product<5, COLS>(a, a_step, b, step, apart, count, add, out, out_step);
    default: return product<AT_ONCE, COLS>(a, a_step, b, step, apart, count, add, out, out_step);
  }
}
// Of at most AT_ONCE rows and VECTORS vectors.
template <class B>
static void products(int rows, int vectors, const float* a, long a_step, const B* b, long step, long apart, long count, bool add, float* out, long out_step) {
  switch (vectors) {
    case 1: return product_rows<1>(rows, a, a_step, b, step, apart, count, add, out, out_step);
    case 2: return product_rows<2>(rows, a, a_step, b, step, apart, count, add, out, out_step);
    case 3: return product_rows<3>(rows, a, a_step, b, step, apart, count, add, out, out_step);
    default: return product_rows<4>(rows, a, a_step, b, step, apart, count, add, out, out_step);
  }
}

// A packed weight is panels of 16 outputs: float32 `[k][16]`; bfloat16 `[k / 2][16][2]`, k rounded up to 32, so that a
// tile of AMX is a kilobyte of it.
static long depth(int dtype, long k) { return dtype == 0 ? k : (k + 31) / 32 * 32; }
template <class T> static inline long place(long row, long col, long deep) {
  long panel = row / LANES * deep * LANES, lane = row % LANES;
  return sizeof(T) == 4 ? panel + col * LANES + lane : panel + col / 2 * 2 * LANES + lane * 2 + col % 2;
}
template <class T> static void pack(const T* w, long n, long k, T* out) {
  long deep = depth(sizeof(T) == 4 ? 0 : 1, k), panels = (n + LANES - 1) / LANES;
  std::memset((void*)out, 0, panels * deep * LANES * sizeof(T));
  for (long row = 0; row < n; row++)
    for (long col = 0; col < k; col++) out[place<T>(row, col, deep)] = w[row * k + col];
}
// Returns the place of the first of `rows` that is none of the n, -1 where all are.
template <class T> static long unpack_rows(const T* packed, long n, long k, const int64_t* rows, long count, T* out) {
  long deep = depth(sizeof(T) == 4 ? 0 : 1, k);
  for (long i = 0; i < count; i++) {
    if (rows[i] < 0 || rows[i] >= n) return i;
    for (long col = 0; col < k; col++) out[i * k + col] = packed[place<T>(rows[i], col, deep)];
  }
  return -1;
}

struct Product {
  const void* x; const void* packed; const void* bias; void* out;
  long m, n, k, x_step;
};
template <class T> static void plain_product(const Product& p, const float* x, long x_step, long first, long last) {
  const T *packed = (const T*)p.packed, *bias = (const T*)p.bias;
  T* out = (T*)p.out;
  long deep = depth(sizeof(T) == 4 ? 0 : 1, p.k), panels = (p.n + LANES - 1) / LANES;
  for (long panel = first * VECTORS; panel < std::min(panels, last * VECTORS); panel += VECTORS) {
    int vectors = int(std::min<long>(VECTORS, panels - panel));
    for (long row = 0; row < p.m; row += AT_ONCE) {
      int rows = int(std::min<long>(AT_ONCE, p.m - row));
      float sums[AT_ONCE * VECTORS * LANES], part[AT_ONCE * VECTORS * LANES];
      for (long begin = 0; begin < deep; begin += DEPTH_AT_ONCE) {
        products(rows, vectors, x + row * x_step + begin, x_step, packed + (panel * deep + begin) * LANES, LANES, deep * LANES,
                 std::min(DEPTH_AT_ONCE, deep - begin), false, begin ? part : sums, VECTORS * LANES);
        if (begin)
          for (int r = 0; r < rows; r++)
            for (int j = 0; j < vectors; j++) {
              float* into = sums + (r * VECTORS + j) * LANES;
              store(into, load(into) + load(part + (r * VECTORS + j) * LANES));
            }
      }
      for (int j = 0; j < vectors; j++) {
        long col = (panel + j) * LANES;
        int count = int(std::min<long>(LANES, p.n - col));
        Floats offset = bias ? load_some(bias + col, count) : Floats{};
        for (int r = 0; r < rows; r++)
          store_some(out + (row + r) * p.n + col, load(sums + (r * VECTORS + j) * LANES) + offset, count);
      }
    }
  }
}
#if defined(__AMX_BF16__)
struct TileConfig { uint8_t palette = 1, start = 0, none[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; };
static bool has_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // asks the system for the tiles' state
static void set_tiles(long upper, long lower) {
  TileConfig c;
  for (int t = 0; t < 8; t++) {
    c.rows[t] = uint8_t(t >= 6 ? 16 : (t == 2 || t == 3 || t == 5) ? lower : upper);
    c.bytes[t] = c.rows[t] ? 64 : 0;
  }
  _tile_loadconfig(&c);
}
// What follows a tile of a weight, into the cache: memory is slower than the product of few rows.
static inline void fetch(const bf16* tile) {
  for (long line = 4096; line < 4096 + 1024; line += 64) __builtin_prefetch((const char*)tile + line);
}
constexpr long CHUNK = 384;
// Adds the products of inputs [begin, end) to the sums of 32 rows and two panels, four tiles; from 0 on sets them.
static void sum_tiles(const bf16* a, long step, const bf16* left, const bf16* right, long begin, long end, bool lower, bool fetches,
                      float* sums) {
  if (begin == 0) { _tile_zero(0); _tile_zero(1); } else { _tile_loadd(0, sums, 64); _tile_loadd(1, sums + 256, 64); }
  if (lower) {
    if (begin == 0) { _tile_zero(2); _tile_zero(3); } else { _tile_loadd(2, sums + 512, 64); _tile_loadd(3, sums + 768, 64); }
    for (long k = begin; k < end; k += 32) {
      if (fetches) fetch(left + k * LANES), fetch(right + k * LANES);
      _tile_loadd(4, a + k, step * 2);
      _tile_loadd(5, a + 16 * step + k, step * 2);
      _tile_loadd(6, left + k * LANES, 64);
      _tile_loadd(7, right + k * LANES, 64);
      _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64);
  } else {
    for (long k = begin; k < end; k += 32) {
      if (fetches) fetch(left + k * LANES), fetch(right + k * LANES);
      _tile_loadd(4, a + k, step * 2);
      _tile_loadd(6, left + k * LANES, 64);
      _tile_loadd(7, right + k * LANES, 64);
      _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
}
static void tile_product(const Product& p, const bf16* x, long x_step, long first, long last) {
  long deep = depth(1, p.k), panels = (p.n + LANES - 1) / LANES, set = -1;
  const bf16 *packed = (const bf16*)p.packed, *bias = (const bf16*)p.bias;
  bf16* out = (bf16*)p.out;
  // Of many rows some inputs at a time, as many as a core's first cache holds of both panels; sums go on where they were.
  long chunk = p.m > 64 && deep > 2 * CHUNK ? CHUNK : deep, heights = (p.m + 31) / 32;
  alignas(64) float few[4 * 256];
  float* all_sums = chunk < deep ? scratch(heights * 4 * 256) : few;
  for (long panel = first * 2; panel < std::min(panels, last * 2); panel += 2) {
    const bf16 *left = packed + panel * deep * LANES, *right = left + deep * LANES;
    bool both = panel + 1 < panels;
    if (!both) right = left;
    for (long begin = 0; begin < deep; begin += chunk)
      for (long row = 0; row < p.m; row += 32) {
        long upper = std::min<long>(16, p.m - row), lower = std::max<long>(0, std::min<long>(16, p.m - row - 16));
        if (set != upper * 32 + lower) set_tiles(upper, lower), set = upper * 32 + lower;
        float* sums = chunk < deep ? all_sums + row * 32 : all_sums;
        long end = std::min(deep, begin + chunk);
        sum_tiles(x + row * x_step, x_step, left, right, begin, end, lower > 0, row == 0, sums);
        if (end < deep) continue;
        for (int j = 0; j < 1 + both; j++) {
          long col = (panel + j) * LANES;
          int count = int(std::min<long>(LANES, p.n - col));
          Floats add = bias ? load_some(bias + col, count) : Floats{};
          for (long r = 0; r < upper + lower; r++) {
            Floats y = load(sums + ((r / 16) * 2 + j) * 256 + r % 16 * 16) + add;
            store_some(out + (row + r) * p.n + col, y, count);
          }
        }
      }
  }
  _tile_release();
}
#endif

static void linear_float(const Product& p, int threads) {
  share(threads, ((p.n + LANES - 1) / LANES + VECTORS - 1) / VECTORS, 1, [&](long first, long last) {
    plain_product<float>(p, (const float*)p.x, p.x_step, first, last);
  });
}
static void linear_bf16(const Product& p, int threads) {
  long deep = depth(1, p.k), panels = (p.n + LANES - 1) / LANES;
  const bf16* x = (const bf16*)p.x;
#if defined(__AMX_BF16__)
  if (has_tiles) {
    long step = p.x_step;
    if (deep != p.k) {  // a tile reads whole kilobytes
      bf16* wide = (bf16*)scratch(p.m * deep / 2, OF_ALL);
      for (long r = 0; r < p.m; r++) {
        std::memcpy((void*)(wide + r * deep), x + r * step, p.k * 2);
        std::memset((void*)(wide + r * deep + p.k), 0, (deep - p.k) * 2);
      }
      x = wide;
      step = deep;
    }
    return share(threads, (panels + 1) / 2, 1, [&](long first, long last) { tile_product(p, x, step, first, last); });
  }
#endif
  float* wide = scratch(p.m * deep, OF_ALL);
  for (long r = 0; r < p.m; r++)
    for (long c = 0; c < deep; c++) wide[r * deep + c] = c < p.k ? to_float(x[r * p.x_step + c]) : 0.0f;
  share(threads, (panels + VECTORS - 1) / VECTORS, 1, [&](long first, long last) {
    plain_product<bf16>(p, wide, deep, first, last);
  });
}

// ---- Norms, gates, rotation

template <class T, class W>
static void norm_rows(const T* x, const T* residual, const W* weight, T* normed, T* total, long rows, long size, float eps) {
  for (long r = 0; r < rows; r++) {
    const T* from = x + r * size;
    T* to = total ? total + r * size : nullptr;
    Floats squares{};
    for (long c = 0; c < size; c += LANES) {
      int count = int(std::min<long>(LANES, size - c));
      Floats v = load_some(from + c, count);
      if (residual) {
        v = rounded<T>(v + load_some(residual + r * size + c, count));
        store_some(to + c, v, count);
      }
      squares += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    const T* source = residual ? to : from;
    for (long c = 0; c < size; c += LANES) {
      int count = int(std::min<long>(LANES, size - c));
      store_some(normed + r * size + c, load_some(source + c, count) * scale * load_some(weight + c, count), count);
    }
  }
}
template <class T> static void gate_rows(const T* gate_up, T* out, long rows, long inner, bool is_gelu) {
  for (long r = 0; r < rows; r++)
    for (long c = 0; c < inner; c += LANES) {
      int count = int(std::min<long>(LANES, inner - c));
      Floats g = load_some(gate_up + r * 2 * inner + c, count), up = load_some(gate_up + r * 2 * inner + inner + c, count);
      Floats turn = is_gelu ? 1.5957691216057308f * (g + 0.044715f * g * g * g) : g;
      store_some(out + r * inner + c, rounded<T>(g / (1.0f + vexp(-turn))) * up, count);
    }
}

static inline uint8_t to_fp8(float x) {
  uint32_t bits; std::memcpy(&bits, &x, 4);
  uint32_t size = bits & 0x7fffffff;
  int32_t code;
  if (size < 0x3c800000) {
    float magnitude; std::memcpy(&magnitude, &size, 4);
    magnitude += 16384.0f;
    uint32_t b; std::memcpy(&b, &magnitude, 4);
    code = int32_t(b) - 0x46800000;
  } else {
    code = int32_t((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - 960;
  }
  return uint8_t(((bits >> 24) & 0x80) | uint32_t(std::min(code, 0x7e)));
}
// A head of KV to the cache, which is of any of its three types.
template <class T> static void write_head(const T* head, void* cache, int kv_dtype, float* scale, long at, long dim) {
  if (kv_dtype == 2) {
    float most = 0;
    for (long c = 0; c < dim; c++) most = std::max(most, std::fabs(to_float(head[c])));
    *scale = most / 448.0f;
    float divisor = *scale > 0 ? *scale : 1.0f;
    for (long c = 0; c < dim; c++) ((uint8_t*)cache)[at + c] = to_fp8(to_float(head[c]) / divisor);
  } else {
    for (long c = 0; c < dim; c += LANES) {
      int count = int(std::min<long>(LANES, dim - c));
      if (kv_dtype == 0) store_some((float*)cache + at + c, load_some(head + c, count), count);
      else store_some((bf16*)cache + at + c, load_some(head + c, count), count);
    }
  }
}
// One head normed and rotated, rounded where `qk_norm_rope_write_reference` rounds.
template <class T, class W>
static void turn_head(const T* from, const W* weight, const T* cos, const T* sin, T* to, long dim, float eps) {
  T normed[1024];
  if (weight) {
    Floats squares{};
    for (long c = 0; c < dim; c += LANES) {
      Floats v = load_some(from + c, int(std::min<long>(LANES, dim - c)));
      squares += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
    bool same = std::is_same<T, W>::value;
    for (long c = 0; c < dim; c += LANES) {
      int count = int(std::min<long>(LANES, dim - c));
      Floats v = load_some(from + c, count) * scale;
      store_some(normed + c, (same ? rounded<T>(v) : v) * load_some(weight + c, count), count);
    }
    from = normed;
  }
  long half = dim / 2;
  for (long c = 0; c < half; c += LANES) {
    int count = int(std::min<long>(LANES, half - c));
    Floats low = load_some(from + c, count), high = load_some(from + half + c, count);
    Floats cos_low = load_some(cos + c, count), cos_high = load_some(cos + half + c, count);
    Floats sin_low = load_some(sin + c, count), sin_high = load_some(sin + half + c, count);
    store_some(to + c, rounded<T>(low * cos_low) + high * sin_low, count);
    store_some(to + half + c, rounded<T>(high * cos_high) + low * sin_high, count);
  }
}
struct Rotation {
  const void *qkv, *norm, *cos, *sin; const int64_t* slots;
  void *query, *cache; float* scales;
  long tokens, heads, kv_heads, dim;
  float eps; int norm_dtype, kv_dtype;
};
template <class T, class W> static void rope_rows(const Rotation& p, long first, long last) {
  long width = (p.heads + 2 * p.kv_heads) * p.dim;
  for (long t = first; t < last; t++) {
    const T *row = (const T*)p.qkv + t * width, *cos = (const T*)p.cos + t * p.dim, *sin = (const T*)p.sin + t * p.dim;
    const W* norm = (const W*)p.norm;
    for (long h = 0; h < p.heads; h++)
      turn_head(row + h * p.dim, norm ? norm + h * p.dim : nullptr, cos, sin, (T*)p.query + (t * p.heads + h) * p.dim, p.dim, p.eps);
    if (p.slots[t] < 0) continue;
    long at = p.slots[t] * 2 * p.kv_heads;
    for (long h = 0; h < 2 * p.kv_heads; h++) {
      const T* head = row + (p.heads + h) * p.dim;
      T turned[1024];
      if (h < p.kv_heads) {
        turn_head(head, norm ? norm + (p.heads + h) * p.dim : nullptr, cos, sin, turned, p.dim, p.eps);
        head = turned;
      }
      write_head(head, p.cache, p.kv_dtype, p.scales ? p.scales + at + h : nullptr, (at + h) * p.dim, p.dim);
    }
  }
}

// ---- Attention

struct Attention {
  const void *query, *cache; const float* scales; void* out;
  const int32_t* tables; const int64_t *first_token, *query_lens, *seq_lens; const void* sinks;
  long rows, table_step, heads, kv_heads, dim, block_size, window;
  float scale; int causal, kv_dtype;
};
// POSITIONS rows of `[dim]` -> `[dim][POSITIONS]`.
static void transpose(const float* from, float* to, long dim) {
#if defined(__AVX512F__)
  for (long d = 0; d < dim; d += 16)
    for (long t = 0; t < POSITIONS; t += 16) {
      __m512 r[16], s[16];
      for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(from + (t + i) * dim + d);
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
#else
  for (long t = 0; t < POSITIONS; t++)
    for (long d = 0; d < dim; d++) to[d * POSITIONS + t] = from[t * dim + d];
#endif
}
// Queries [first, last) of a row, of the heads that share a head of KV.
template <class T, class KV>
static void attend_piece(const Attention& p, long row, long head, long first, long last) {
  long group = p.heads / p.kv_heads, dim = p.dim, queries = (last - first) * group;
  float* memory = scratch(POSITIONS * dim * 3 + queries * (2 * dim + POSITIONS + 2));
  float *key = memory, *value = key + POSITIONS * dim, *turned = value + POSITIONS * dim;
  float *query = turned + POSITIONS * dim, *output = query + queries * dim, *scores = output + queries * dim;
  float *most = scores + queries * POSITIONS, *total = most + queries;
  long token = p.first_token[row] + first, start = p.seq_lens[row] - p.query_lens[row] + first;
  for (long q = 0; q < queries; q++) {
    const T* from = (const T*)p.query + ((token + q / group) * p.heads + head * group + q % group) * dim;
    for (long c = 0; c < dim; c += LANES) store(query + q * dim + c, load(from + c)), store(output + q * dim + c, Floats{});
    most[q] = p.sinks ? to_float(((const T*)p.sinks)[head * group + q % group]) : -INFINITY;
    total[q] = p.sinks ? 1.0f : 0.0f;
  }
  long end = p.causal ? start + (last - first) : p.seq_lens[row];
  long begin = p.window ? std::max<long>(0, start - p.window + 1) : 0;
  const int32_t* table = p.tables + row * p.table_step;
  for (long base = begin / POSITIONS * POSITIONS; base < end; base += POSITIONS) {
    long count = std::min<long>(POSITIONS, end - base);
    for (long t = 0; t < count;) {  // a block of KV after the other
      long offset = (base + t) % p.block_size, run = std::min(count - t, p.block_size - offset);
      long at = (long(table[(base + t) / p.block_size]) * p.block_size + offset) * 2 * p.kv_heads + head;
      for (long stop = t + run; t < stop; t++, at += 2 * p.kv_heads) {
        const KV *from = (const KV*)p.cache + at * dim, *values = from + p.kv_heads * dim;
        float *k = key + t * dim, *v = value + t * dim;
        if (p.scales) {
          float ks = p.scales[at], vs = p.scales[at + p.kv_heads];
          for (long c = 0; c < dim; c += LANES) {
            store(k + c, rounded<T>(load(from + c) * ks));
            store(v + c, rounded<T>(load(values + c) * vs));
          }
        } else {
          for (long c = 0; c < dim; c += LANES) store(k + c, load(from + c)), store(v + c, load(values + c));
        }
      }
    }
    std::memset(key + count * dim, 0, (POSITIONS - count) * dim * sizeof(float));
    transpose(key, turned, dim);
    for (long q = 0; q < queries; q += AT_ONCE)
      products(int(std::min<long>(AT_ONCE, queries - q)), VECTORS, query + q * dim, dim, turned, POSITIONS, LANES, dim, false,
               scores + q * POSITIONS, POSITIONS);
    for (long q = 0; q < queries; q++) {
      float* s = scores + q * POSITIONS;
      for (int j = 0; j < VECTORS; j++) store(s + j * LANES, load(s + j * LANES) * p.scale);
      long position = start + q / group, seen = p.causal ? std::min(count, position + 1 - base) : count, hidden = 0;
      if (p.window) {
        hidden = std::max<long>(0, position - p.window + 1 - base);
        if (!p.causal) seen = std::min(seen, position + p.window - base);
      }
      for (long t = 0; t < std::min<long>(hidden, POSITIONS); t++) s[t] = -INFINITY;
      for (long t = std::max<long>(seen, 0); t < POSITIONS; t++) s[t] = -INFINITY;
      Floats top = load(s);
      for (int j = 1; j < VECTORS; j++) { Floats x = load(s + j * LANES); top = x > top ? x : top; }
      float now = std::max(most[q], largest(top));
      if (now == -INFINITY) {
        for (int j = 0; j < VECTORS; j++) store(s + j * LANES, Floats{});
        continue;
      }
      float keep = std::exp(most[q] - now);
      Floats added{};
      for (int j = 0; j < VECTORS; j++) {
        Floats e = vexp(load(s + j * LANES) - now);
        store(s + j * LANES, e);
        added += e;
      }
      total[q] = total[q] * keep + sum(added);
      most[q] = now;
      if (keep != 1.0f)
        for (long c = 0; c < dim; c += LANES) store(output + q * dim + c, load(output + q * dim + c) * keep);
    }
    for (long c = 0; c < dim; c += VECTORS * LANES)
      for (long q = 0; q < queries; q += AT_ONCE)
        products(int(std::min<long>(AT_ONCE, queries - q)), int(std::min<long>(VECTORS, (dim - c) / LANES)), scores + q * POSITIONS,
                 POSITIONS, value + c, dim, LANES, count, true, output + q * dim + c, dim);
  }
  for (long q = 0; q < queries; q++) {
    T* to = (T*)p.out + ((token + q / group) * p.heads + head * group + q % group) * dim;
    float inverse = total[q] > 0 ? 1.0f / total[q] : 0.0f;
    for (long c = 0; c < dim; c += LANES) store(to + c, load(output + q * dim + c) * inverse);
  }
}
template <class T, class KV> static void attend(const Attention& p, int threads) {
  struct Piece { int row, head, first, last; };
  long most = std::max<long>(1, QUERY_ROWS / (p.heads / p.kv_heads));
  std::vector<Piece> pieces;
  for (long row = 0; row < p.rows; row++)
    for (long head = 0; head < p.kv_heads; head++)
      for (long first = 0; first < p.query_lens[row]; first += most)
        pieces.push_back({int(row), int(head), int(first), int(std::min(first + most, p.query_lens[row]))});
  share(threads, long(pieces.size()), 1, [&](long from, long to) {
    for (long i = from; i < to; i++) attend_piece<T, KV>(p, pieces[i].row, pieces[i].head, pieces[i].first, pieces[i].last);
  });
}
template <class T> static void attend_any(const Attention& p, int threads) {
  if (p.kv_dtype == 0) attend<T, float>(p, threads);
  else if (p.kv_dtype == 1) attend<T, bf16>(p, threads);
  else attend<T, fp8>(p, threads);
}

// ---- The choice of a token

constexpr long TILE = 8192;  // scores of a row that one thread looks through
struct Choice {
  const void* logits; long rows, vocab, step;
  const float* temperature; const int64_t *seeds, *positions; const float* lowest; const int64_t* ids;
};
static inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
static inline Floats vlog(Floats x) {  // Cephes, of normal positive numbers
  Ints bits = (Ints)x;
  Floats e = __builtin_convertvector((bits >> 23) - 126, Floats);
  Floats m = (Floats)((bits & 0x007fffff) | 0x3f000000);
  Ints small = m < 0.707106781186547524f;
  e = small ? e - 1.0f : e;
  m = (small ? m + m : m) - 1.0f;
  Floats z = m * m, y = all(7.0376836292e-2f);
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z + e * -2.12194440e-4f - 0.5f * z;
  return m + y + e * 0.693359375f;
}
// `gumbel` of gumbel_noise.py, of 16 ids.
static inline Floats gumbel(uint64_t key, const int64_t* ids) {
  uint32_t high[LANES];
  for (int half = 0; half < LANES; half += 8) {
    Longs id;
    std::memcpy(&id, ids + half, 64);
    Longs x = key + (id + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x = (x ^ (x >> 31)) >> 32;
    for (int i = 0; i < 8; i++) high[half + i] = uint32_t(x[i]);
  }
  Bits b;
  std::memcpy(&b, high, 64);
  Floats y = (__builtin_convertvector(b, Floats) + 0.5f) * 2.3283064365386963e-10f;
  y = y > 0.99999994f ? all(0.99999994f) : y;
  Floats s = y / (2.0f - y), s2 = s * s;
  Floats series = 1.0f + s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9 + s2 * (1.0f / 11)))));
  return -vlog(y < 0.25f ? 2.0f * s * series : -vlog(1.0f - y));
}
// The best of the scores [first, last) of a row, and its place.
template <class T> static void best_of(const Choice& p, long row, long first, long last, float& best, int64_t& place) {
  const T* logits = (const T*)p.logits + row * p.step;
  float temperature = p.temperature ? p.temperature[row] : 0.0f;
  uint64_t key = 0;
  if (temperature != 0.0f) key = mix(mix(uint64_t(p.seeds[row]) + 0x9E3779B97F4A7C15u) + (uint64_t(p.positions[row]) + 1) * 0x9E3779B97F4A7C15u);
  Ints lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  Floats most = all(-INFINITY);
  Ints where = lane + int(first), odd{};
  for (long c = first; c < last; c += LANES) {
    int count = int(std::min<long>(LANES, last - c));
    Floats raw = load_some(logits + c, count), x = raw;
    if (temperature != 0.0f) {
      int64_t ids[LANES];
      for (int i = 0; i < LANES; i++) ids[i] = p.ids ? p.ids[std::min(c + i, p.vocab - 1)] : c + i;
      x = raw / temperature;
      if (p.lowest) x = raw < p.lowest[row] ? all(-INFINITY) : x;
      x += gumbel(key, ids);
    }
    if (count < LANES) x = lane < count ? x : all(-INFINITY);
    odd |= x != x;
    Ints more = x > most;
    most = more ? x : most;
    where = more ? lane + int(c) : where;
  }
  for (int i = 0; i < LANES; i++)
    if (odd[i]) {  // a NaN counts as the largest
      for (place = first; to_float(logits[place]) == to_float(logits[place]); place++) if (place + 1 == last) break;
      best = NAN;
      return;
    }
  best = most[0], place = where[0];
  for (int i = 1; i < LANES; i++)
    if (most[i] > best || (most[i] == best && where[i] < place)) best = most[i], place = where[i];
}
template <class T> static void choose(const Choice& p, int threads, int64_t* out) {
  long tiles = (p.vocab + TILE - 1) / TILE;
  std::vector<float> best(p.rows * tiles);
  std::vector<int64_t> place(p.rows * tiles);
  share(threads, p.rows * tiles, 4, [&](long from, long to) {
    for (long i = from; i < to; i++) {
      long first = i % tiles * TILE;
      best_of<T>(p, i / tiles, first, std::min(first + TILE, p.vocab), best[i], place[i]);
    }
  });
  for (long row = 0; row < p.rows; row++) {
    long chosen = row * tiles;
    for (long i = chosen + 1; i < (row + 1) * tiles && best[chosen] == best[chosen]; i++)
      if (best[i] > best[chosen] || best[i] != best[i]) chosen = i;
    out[row] = place[chosen];
  }
}

// ---- What Python calls. dtype: 0 float32, 1 bfloat16; of KV also 2, FP8

extern "C" {
int64_t dflash_packed_numbers(int dtype, int64_t n, int64_t k) { return (n + LANES - 1) / LANES * LANES * depth(dtype, k); }
void dflash_pack(int dtype, const void* w, int64_t n, int64_t k, void* out) {
  if (dtype == 0) pack((const float*)w, n, k, (float*)out); else pack((const bf16*)w, n, k, (bf16*)out);
}
int64_t dflash_unpack_rows(int dtype, const void* packed, int64_t n, int64_t k, const int64_t* rows, int64_t count, void* out) {
  if (dtype == 0) return unpack_rows((const float*)packed, n, k, rows, count, (float*)out);
  return unpack_rows((const bf16*)packed, n, k, rows, count, (bf16*)out);
}
void dflash_linear(int dtype, int threads, const void* x, int64_t x_step, const void* packed, const void* bias, void* out,
                   int64_t m, int64_t n, int64_t k) {
  Product p{x, packed, bias, out, m, n, k, x_step};
  if (dtype == 0) linear_float(p, threads); else linear_bf16(p, threads);
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
  Rotation p{qkv, norm, cos, sin, slots, query, cache, scales, tokens, heads, kv_heads, dim, eps, norm_dtype, kv_dtype};
  share(threads, tokens, std::max<long>(1, 8192 / ((heads + 2 * kv_heads) * dim)), [&](long first, long last) {
    if (dtype == 0) rope_rows<float, float>(p, first, last);
    else if (norm_dtype == 0) rope_rows<bf16, float>(p, first, last);
    else rope_rows<bf16, bf16>(p, first, last);
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
// A product and what follows it, without a call between them. Packed weights and their biases; `rope`: as of dflash_rope_write.
void dflash_linear_rope_write(int dtype, int norm_dtype, int kv_dtype, int threads, const void* x, int64_t x_step, const void* packed,
                              const void* bias, int64_t k, const void* norm, float eps, const void* cos, const void* sin,
                              const int64_t* slots, void* query, void* cache, float* scales, int64_t tokens, int64_t heads,
                              int64_t kv_heads, int64_t dim) {
  int64_t width = (heads + 2 * kv_heads) * dim;
  void* qkv = scratch(tokens * width, BETWEEN);
  dflash_linear(dtype, threads, x, x_step, packed, bias, qkv, tokens, width, k);
  dflash_rope_write(dtype, norm_dtype, kv_dtype, threads, qkv, norm, eps, cos, sin, slots, query, cache, scales, tokens, heads,
                    kv_heads, dim);
}
void dflash_linear_norm(int dtype, int weight_dtype, int threads, const void* x, int64_t x_step, const void* packed, const void* bias,
                        const void* residual, const void* weight, void* normed, void* total, int64_t m, int64_t n, int64_t k,
                        float eps) {
  void* product = scratch(m * n, BETWEEN);
  dflash_linear(dtype, threads, x, x_step, packed, bias, product, m, n, k);
  dflash_norm(dtype, weight_dtype, threads, product, residual, weight, normed, total, m, n, eps);
}
void dflash_gated_mlp(int dtype, int threads, int is_gelu, const void* x, int64_t x_step, const void* gate_up, const void* gate_up_bias,
                      const void* down, const void* down_bias, void* out, int64_t m, int64_t hidden, int64_t inner, int64_t n) {
  void* both = scratch(3 * m * inner, BETWEEN);
  void* gated = (char*)both + 2 * m * inner * (dtype == 0 ? 4 : 2);
  dflash_linear(dtype, threads, x, x_step, gate_up, gate_up_bias, both, m, 2 * inner, hidden);
  dflash_gate(dtype, threads, is_gelu, both, gated, m, inner);
  dflash_linear(dtype, threads, gated, inner, down, down_bias, out, m, n, inner);
}
// Runs on a processor for the first time: 0 where it does what it should.
int dflash_trial() {
  std::vector<bf16> x(64, bf16{0x3f80}), w(64 * 32, bf16{0x3f80}), packed(64 * 32), out(32);
  std::vector<float> y(64, 1.0f), v(64 * 32, 1.0f), packed_floats(64 * 32), sums(32);
  dflash_pack(1, w.data(), 32, 64, packed.data());
  dflash_linear(1, 1, x.data(), 64, packed.data(), nullptr, out.data(), 1, 32, 64);
  dflash_pack(0, v.data(), 32, 64, packed_floats.data());
  dflash_linear(0, 2, y.data(), 64, packed_floats.data(), nullptr, sums.data(), 1, 32, 64);
  return to_float(out[31]) != 64.0f || sums[31] != 64.0f;
}
}

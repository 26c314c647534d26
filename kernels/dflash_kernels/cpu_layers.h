// Norms, gates, and rotation with the write of KV.

#pragma once
#include "cpu_numbers.h"

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
      store_some(out + r * inner + c, gated<T>(g, up, is_gelu), count);
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
    for (long c = 0; c < dim; c++)
      if (float size = std::fabs(to_float(head[c])); size > most || size != size) most = size;  // a NaN stays one
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
// One head normed and rotated, rounded where `qk_norm_rope_write_reference` rounds. `sin` has the sines of the first half
// negated; `dim` is at most `MAX_HEAD_DIM` (cpu_ops.py).
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
  long tokens, heads, kv_heads, dim, step;  // between rows of qkv
  float eps; int norm_dtype, kv_dtype;
};
template <class T, class W> static void rope_rows(const Rotation& p, long first, long last) {
  for (long t = first; t < last; t++) {
    const T *row = (const T*)p.qkv + t * p.step, *cos = (const T*)p.cos + t * p.dim, *sin = (const T*)p.sin + t * p.dim;
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
static void rope_any(int dtype, const Rotation& p, long first, long last) {
  if (dtype == 0) rope_rows<float, float>(p, first, last);
  else if (p.norm_dtype == 0) rope_rows<bf16, float>(p, first, last);
  else rope_rows<bf16, bf16>(p, first, last);
}

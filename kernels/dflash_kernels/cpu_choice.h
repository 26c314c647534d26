// The choice of a token: argmax, with a request's noise or without, which tokens filters keep, and penalties; log-probabilities.

#pragma once
#include <functional>
#include <numeric>
#include "cpu_numbers.h"

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
  Floats e = converted<Floats>((bits >> 23) - 126);
  Floats m = (Floats)((bits & 0x007fffff) | 0x3f000000);
  Ints small = m < 0.707106781186547524f;
  e = select(small, e - 1.0f, e);
  m = select(small, m + m, m) - 1.0f;
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
static inline uint64_t noise_key(int64_t seed, int64_t position) {
  return mix(mix(uint64_t(seed) + 0x9E3779B97F4A7C15u) + (uint64_t(position) + 1) * 0x9E3779B97F4A7C15u);
}
// `gumbel` of gumbel_noise.py, of 16 ids.
static inline Floats gumbel(uint64_t key, const int64_t* ids) {
  uint32_t high[LANES];
  for (int half = 0; half < LANES; half += 8) {
    Longs x = key + (vector_at<Longs>(ids + half) + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x = (x ^ (x >> 31)) >> 32;
    uint64_t wide[8];
    put(wide, x);
    for (int i = 0; i < 8; i++) high[half + i] = uint32_t(wide[i]);
  }
  Floats y = (converted<Floats>(vector_at<Bits>(high)) + 0.5f) * 2.3283064365386963e-10f;
  y = select(y > 0.99999994f, all(0.99999994f), y);
  Floats s = y / (2.0f - y), s2 = s * s;
  Floats series = 1.0f + s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9 + s2 * (1.0f / 11)))));
  return -vlog(select(y < 0.25f, 2.0f * s * series, -vlog(1.0f - y)));
}
// The best of the scores [first, last) of a row, and its place.
template <class T> static void best_of(const Choice& p, long row, long first, long last, float& best, int64_t& place) {
  const T* logits = (const T*)p.logits + row * p.step;
  float temperature = p.temperature ? p.temperature[row] : 0.0f;
  uint64_t key = 0;
  if (temperature != 0.0f) key = noise_key(p.seeds[row], p.positions[row]);
  Floats most = all(-INFINITY);
  Ints lane = lanes(), where = lane + int(first), odd{};
  for (long c = first; c < last; c += LANES) {
    int count = int(std::min<long>(LANES, last - c));
    Floats raw = load_some(logits + c, count), x = raw;
    if (temperature != 0.0f && p.lowest && !any((raw < p.lowest[row]) ^ -1)) continue;  // all are hidden: no noise is made
    if (temperature != 0.0f) {
      int64_t ids[LANES];
      for (int i = 0; i < LANES; i++) ids[i] = p.ids ? p.ids[std::min(c + i, p.vocab - 1)] : c + i;
      x = raw / temperature;
      if (p.lowest) x = select(raw < p.lowest[row], all(-INFINITY), x);
      x += gumbel(key, ids);
    }
    if (count < LANES) x = select(lane < count, x, all(-INFINITY));
    odd |= x != x;
    Ints more = x > most;
    most = select(more, x, most);
    where = select(more, lane + int(c), where);
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
constexpr long GROUP = 64;  // logits that are passed over where their largest is too low
struct Weighed { float logit, weight; };

// The lowest of `some`, in any order, above which lies less weight than `target`; if none, the largest; -infinity of none.
static float last_within(std::vector<Weighed>& some, double target) {
  size_t first = 0, end = some.size();
  double above = 0.0;  // of those before `first`
  while (end - first > 1) {
    size_t middle = (first + end) / 2;
    auto at = some.begin();
    std::nth_element(at + first, at + middle, at + end, [](const Weighed& a, const Weighed& b) { return a.logit > b.logit; });
    double more = above;
    for (size_t i = first; i < middle; i++) more += some[i].weight;
    if (more < target) first = middle, above = more;
    else end = middle;
  }
  return some.empty() ? -INFINITY : some[first].logit;
}
// What min-p keeps is from here on.
static inline float min_p_edge(float top, float temperature, float min_p) { return top + temperature * std::log(min_p); }
// The lowest logit that a row keeps (`logits_filter.py`), -infinity where it filters nothing. It is looked for among those that are certain to hold it.
template <class T> static float lowest_kept(const T* logits, long vocab, float temperature, int64_t top_k, float top_p, float min_p) {
  bool by_rank = top_k > 0 && top_k < vocab;
  if (temperature == 0.0f || !(by_rank || top_p < 1.0f || min_p > 0.0f)) return -INFINITY;
  auto at = [&](long c) {
    Floats x = load_some(logits + c, int(std::min<long>(LANES, vocab - c)));
    return c + LANES <= vocab ? x : select(lanes() < int(vocab - c), x, all(-INFINITY));
  };
  long groups = (vocab + GROUP - 1) / GROUP;
  std::vector<float> tops(groups);
  for (long g = 0; g < groups; g++) {
    Floats most = all(-INFINITY);
    for (long c = g * GROUP; c < std::min(vocab, (g + 1) * GROUP); c += LANES) most = larger(at(c), most);
    tops[g] = largest(most);
  }
  float top = *std::max_element(tops.begin(), tops.end()), by = 1.0f / temperature;
  if (!std::isfinite(top)) return -INFINITY;
  float lowest = min_p > 0.0f ? min_p_edge(top, temperature, min_p) : -INFINITY, from = lowest;
  if (!by_rank && !(top_p < 1.0f)) return lowest;
  double total = 0.0;
  if (by_rank && top_k <= groups) {  // that many groups have one that is not below it
    std::vector<float> ordered = tops;
    std::nth_element(ordered.begin(), ordered.begin() + top_k - 1, ordered.end(), std::greater<float>());
    from = std::max(from, ordered[top_k - 1]);
  } else if (!by_rank) {
    for (long g = 0; g < groups; g++) {
      Floats weight{};
      for (long c = g * GROUP; tops[g] >= lowest && c < std::min(vocab, (g + 1) * GROUP); c += LANES) {
        Floats x = at(c);
        weight += select(x >= lowest, vexp((x - top) * by), Floats{});
      }
      total += sum(weight);
    }
    // All below it together weigh less than what is left out.
    double each = (1.0 - double(top_p)) * total / double(vocab);
    from = std::max(from, top + temperature * float(std::log(each)) - 1e-3f * temperature);
  }
  std::vector<Weighed> some;
  for (long g = 0; g < groups; g++)
    for (long c = g * GROUP; tops[g] >= from && c < std::min(vocab, (g + 1) * GROUP); c += LANES) {
      Floats x = at(c);
      if (!any(x >= from)) continue;
      float own[LANES], weights[LANES];
      store(own, x), store(weights, vexp((x - top) * by));
      for (int i = 0; i < LANES; i++)
        if (own[i] >= from) some.push_back({own[i], by_rank ? 1.0f : weights[i]});
    }
  if (by_rank) {
    lowest = std::max(lowest, last_within(some, double(top_k)));
    if (!(top_p < 1.0f)) return lowest;
    some.erase(std::remove_if(some.begin(), some.end(), [&](const Weighed& each) { return each.logit < lowest; }), some.end());
    for (Weighed& each : some) each.weight = std::exp((each.logit - top) * by), total += each.weight;
  }
  return std::max(lowest, last_within(some, double(top_p) * total));
}
// Integers in the order of the numbers.
static inline Ints in_order(Floats x) { Ints bits = (Ints)x; return bits ^ ((bits >> 31) & 0x7fffffff); }
static inline float of_order(int32_t x) { x ^= (x >> 31) & 0x7fffffff; float y; std::memcpy(&y, &x, 4); return y; }
// The columns of the `count` largest logits of a row, the first of equals first: as integers that are the larger the earlier they come, with
// the column in the lower half, by its negative. tops: of each group.
template <class T> static std::vector<int64_t> most_likely(const T* logits, long vocab, const std::vector<int32_t>& tops, long count) {
  int32_t from = INT32_MIN;  // that many groups have one that is not below it
  if (count <= long(tops.size())) {
    std::vector<int32_t> ordered = tops;
    std::nth_element(ordered.begin(), ordered.begin() + count - 1, ordered.end(), std::greater<int32_t>());
    from = ordered[count - 1];
  }
  std::vector<int64_t> some;
  for (long g = 0; g < long(tops.size()); g++)
    for (long c = g * GROUP; from <= tops[g] && c < std::min(vocab, (g + 1) * GROUP); c += LANES) {
      int32_t own[LANES];
      int inside = int(std::min<long>(LANES, vocab - c));
      put(own, in_order(load_some(logits + c, inside)));
      for (int i = 0; i < inside; i++)
        if (own[i] >= from) some.push_back(int64_t((uint64_t(int64_t(own[i])) << 32) - uint64_t(c + i)));
    }
  std::partial_sort(some.begin(), some.begin() + count, some.end(), std::greater<int64_t>());
  some.resize(count);
  return some;
}
// Of a row of logits the log-probabilities of the tokens `ids`, their ranks, then the log-probabilities and the ids of the `num_top` most
// likely ones, at most `vocab`: `ranked_logprobs_reference` of logprobs.py.
template <class T> static void rank_row(const T* logits, long vocab, const int64_t* ids, long num_ids, long num_top, double* out) {
  auto inside = [&](long c) { return int(std::min<long>(LANES, vocab - c)); };
  auto at = [&](long c) {
    Floats x = load_some(logits + c, inside(c));
    return c + LANES <= vocab ? x : select(lanes() < inside(c), x, all(-INFINITY));
  };
  std::vector<int32_t> tops((vocab + GROUP - 1) / GROUP);
  for (long g = 0; g < long(tops.size()); g++) {
    Ints most = Ints{} + INT32_MIN;
    for (long c = g * GROUP; c < std::min(vocab, (g + 1) * GROUP); c += LANES) {
      Ints own = in_order(at(c));
      most = select(own > most, own, most);
    }
    tops[g] = largest(most);
  }
  float top = of_order(*std::max_element(tops.begin(), tops.end()));
  double total = 0.0;
  for (long first = 0; first < vocab; first += GROUP) {
    Floats weight{};
    for (long c = first; c < std::min(vocab, first + GROUP); c += LANES) weight += vexp(at(c) - top);
    total += sum(weight);
  }
  float log_total = float(std::log(total));
  auto logprob = [&](long id) { return (to_float(logits[id]) - top) - log_total; };
  for (long i = 0; i < num_ids; i++) {
    Floats own = all(to_float(logits[ids[i]]));
    Ints rank{};
    for (long c = 0; c < vocab; c += LANES) {
      Ints likely = load_some(logits + c, inside(c)) >= own;
      rank -= c + LANES <= vocab ? likely : likely & (lanes() < inside(c));
    }
    int32_t of_lanes[LANES];
    put(of_lanes, rank);
    out[i] = logprob(ids[i]), out[num_ids + i] = double(std::accumulate(of_lanes, of_lanes + LANES, 0));
  }
  out += 2 * num_ids;
  if (num_top == 0) return;
  for (int64_t each : most_likely(logits, vocab, tops, num_top)) {
    int64_t id = int64_t(uint32_t(-uint64_t(each)));
    *out = logprob(id), out[num_top] = double(id), out++;
  }
}
// The log-odds of a token's probability at temperature 1; NaN where a logit is.
template <class T> static float log_odds_of(const T* logits, long vocab, long id) {
  Ints lane = lanes(), odd{};
  auto others = [&](long c) {  // -infinity in place of the token, and behind the last
    int count = int(std::min<long>(LANES, vocab - c));
    Floats x = load_some(logits + c, count);
    odd |= x != x;
    return select((lane < count) & (lane + int(c) != int(id)), x, all(-INFINITY));
  };
  Floats top = all(-INFINITY), total{};
  for (long c = 0; c < vocab; c += LANES) top = larger(others(c), top);
  for (int i = 0; i < LANES; i++) if (odd[i]) return NAN;
  float shift = largest(top);
  if (shift == -INFINITY) shift = 0.0f;
  for (long c = 0; c < vocab; c += LANES) total += vexp(others(c) - shift);
  return to_float(logits[id]) - shift - std::log(std::max(sum(total), 1e-30f));
}
// Rows whose requests have penalties, as `PenalisedRows` of `penalties.py` has them, and what all requests have of them.
struct Penalties {
  int32_t *counts, *num_counted; const int64_t* tokens; const float* penalties; const int64_t *numbers, *positions; int64_t rows, vocab, max_len;
};
constexpr int32_t IN_PROMPT = 1 << 30;

static void penalise_line(float* logits, const int32_t* counts, long vocab, const float* penalties) {
  float repetition = penalties[0], frequency = penalties[1], presence = penalties[2];
  for (long c = 0; c < vocab; c += LANES) {
    int count = int(std::min<long>(LANES, vocab - c));
    int32_t some[LANES] = {};
    if (count < LANES) std::memcpy(some, counts + c, count * 4);
    Ints known = vector_at<Ints>(count < LANES ? some : counts + c);
    if (!any(known)) continue;
    Floats x = load_some(logits + c, count), times = converted<Floats>(known & (IN_PROMPT - 1));
    x = select(known != 0, select(x > 0.0f, x / repetition, x * repetition), x);
    x -= rounded_by_itself(frequency * times);
    x -= rounded_by_itself(presence * select(times > 0.0f, all(1.0f), Floats{}));
    store_some(logits + c, x, count);
  }
}
// Counts the tokens of a row that are new, then penalises its logits, float32 `[lines, vocab]`.
static void count_and_penalise(const Penalties& p, long row, float* logits) {
  auto number = [&](int line) { return p.numbers[line * p.rows + row]; };
  int64_t index = number(0), position = p.positions[number(1)], prompt_len = number(2), num_draft = number(3);
  const int64_t* tokens = p.tokens + index * p.max_len;
  int32_t* counts = p.counts + index * p.vocab;
  int64_t begin = p.num_counted[index], end = std::min(position, p.max_len);
  for (int64_t at = begin; at < end; at++) {
    if (at < prompt_len) counts[tokens[at]] |= IN_PROMPT;
    else counts[tokens[at]]++;
  }
  p.num_counted[index] = int32_t(std::max(begin, end));
  // A draft counts for the logits behind it, and for no later step.
  auto draft = [&](int64_t i) -> int32_t& { return counts[tokens[std::min(position + i, p.max_len - 1)]]; };
  for (int64_t i = 0; i <= num_draft; i++) {
    if (i > 0) draft(i - 1)++;
    penalise_line(logits + (number(4) + i) * p.vocab, counts, p.vocab, p.penalties + index * 3);
  }
  for (int64_t i = 0; i < num_draft; i++) draft(i)--;
}

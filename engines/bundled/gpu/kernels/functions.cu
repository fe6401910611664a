// The functions of the written definition: exp, the 16 lanes, the tree T. Constants and order as in docs/numerics.md.

DEVICE float exp1(float x) {
  float c = x > 88.0f ? 88.0f : x;
  c = c < -87.0f ? -87.0f : c;
  float n = fma(c, 1.44269504f, 12582912.0f);
  const uint32_t i = static_cast<uint32_t>(__float_as_int(n));
  n = sub(n, 12582912.0f);
  float r = fma(n, -0.693359375f, c);
  r = fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fma(p, r, 1.3981999507e-3f);
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  p = add(fma(p, mul(r, r), r), 1.0f);
  const float e = mul(p, __int_as_float(static_cast<int>((i + 127u) << 23)));
  return x < -87.0f ? 0.0f : e;
}

// Of sums of exponentials: positive and finite, not subnormal.
DEVICE float log1(float x) {
  const int b = __float_as_int(x);
  int e = (b >> 23) - 126;
  float m = __int_as_float((b & 0x007fffff) | 0x3f000000);
  if (m < 0.707106781186547524f) {
    e -= 1;
    m = add(m, m);
  }
  m = sub(m, 1.0f);
  const float z = mul(m, m);
  float p = 7.0376836292e-2f;
  p = fma(p, m, -1.1514610310e-1f);
  p = fma(p, m, 1.1676998740e-1f);
  p = fma(p, m, -1.2420140846e-1f);
  p = fma(p, m, 1.4249322787e-1f);
  p = fma(p, m, -1.6668057665e-1f);
  p = fma(p, m, 2.0000714765e-1f);
  p = fma(p, m, -2.4999993993e-1f);
  p = fma(p, m, 3.3333331174e-1f);
  const float f = static_cast<float>(e);
  float y = fma(f, -2.12194440e-4f, mul(mul(m, z), p));
  y = fma(-0.5f, z, y);
  return fma(f, 0.693359375f, add(m, y));
}

DEVICE float swiglu(float gate, float up) { return mul(divide(gate, add(1.0f, exp1(-gate))), up); }

// Sum of 16 lanes by halves: lane i += lane i + 8, then 4, 2, 1. Whole warps call it; valid in lanes 0 and 16.
DEVICE float fold_lanes(float a) {
  for (int half = 8; half; half >>= 1) a = add(a, __shfl_down_sync(0xffffffffu, a, half, 16));
  return a;
}

// Largest value of a warp, in every lane. Exact, so any order will do; as integers in the order of the floats.
DEVICE int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
DEVICE float warp_maximum(float a) {
  return __int_as_float(ordered(__reduce_max_sync(0xffffffffu, ordered(__float_as_int(a)))));
}

// T over value(first) .. value(first + count - 1): split at the largest power of two below the count.
constexpr int largest_power_below(int count) {
  int p = 1;
  while (2 * p < count) p *= 2;
  return p;
}
template <int count, class F>
DEVICE float tree_of(const F& value, int first = 0) {
  if constexpr (count == 1) {
    return value(first);
  } else {
    constexpr int left = largest_power_below(count);
    const float a = tree_of<left>(value, first);
    return add(a, tree_of<count - left>(value, first + left));
  }
}

// The same for a count known at run time, in place: neighbours pair up, an odd last one is carried.
DEVICE float tree_in_place(float* v, int stride, int count) {
  for (; count > 1; count = (count + 1) / 2) {
    for (int i = 0; i < count / 2; i++) v[i * stride] = add(v[2 * i * stride], v[(2 * i + 1) * stride]);
    if (count & 1) v[(count / 2) * stride] = v[(count - 1) * stride];
  }
  return v[0];
}

// T over values that arrive in order, for any count below 2^16.
struct Tree {
  float level[16];
  int count;
  DEVICE Tree() : count(0) {}
  DEVICE void push(float a) {
    int d = 0;
    for (int t = count++; t & 1; t >>= 1) a = add(level[d++], a);
    level[d] = a;
  }
  // T, with the sum `low` of what comes after the pushed values when there is such.
  DEVICE float close(bool has_low, float low) {
    int d = 0;
    if (!has_low) {
      while (!(count >> d & 1)) d++;
      low = level[d++];
    }
    for (; d < 16; d++)
      if (count >> d & 1) low = add(level[d], low);
    return low;
  }
};

// T over value(0) .. value(count - 1): eight at a time, so that their loads are in flight together.
template <class F>
DEVICE float tree_over(int count, const F& value) {
  Tree upper;
  float v[8];
  for (; count - upper.count * 8 >= 8;) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = value(upper.count * 8 + i);
    upper.push(tree_of<8>([&](int i) { return v[i]; }));
  }
  const int done = upper.count * 8, left = count - done;
#pragma unroll
  for (int i = 0; i < 7; i++) v[i] = i < left ? value(done + i) : 0.0f;
  auto at = [&](int i) { return v[i]; };
  float low = v[0];
  switch (left) {
    case 2: low = tree_of<2>(at); break;
    case 3: low = tree_of<3>(at); break;
    case 4: low = tree_of<4>(at); break;
    case 5: low = tree_of<5>(at); break;
    case 6: low = tree_of<6>(at); break;
    case 7: low = tree_of<7>(at); break;
  }
  return done ? upper.close(left > 0, low) : low;
}

// Address of position `position` of a sequence in a pool of pages.
// Keys: [page][kv head][DIM / 4][slot][4]; values: [page][kv head][slot][DIM].
DEVICE long page_base(const int* table, int position, int head) {
  return (static_cast<long>(table[position / PAGE]) * KV_HEADS + head) * DIM * PAGE;
}
DEVICE long key_at(const int* table, int position, int head) {
  return page_base(table, position, head) + (position % PAGE) * 4;
}
DEVICE long value_at(const int* table, int position, int head) {
  return page_base(table, position, head) + (position % PAGE) * DIM;
}
constexpr int KEY_STRIDE = PAGE * 4;  // floats from one group of four dimensions of a key to the next
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * DIM;

// Decode steps of few rows in two launches a layer: attention from norm to output projection, and the gated MLP.
//
//   cluster = one KV head (attention) or one chunk of the inner width (MLP): exactly one chunk of K of the second product
//   front: qkv or gate_up, as (column, chunk of HIDDEN) chains -> exchange through memory inside the cluster
//   back:  attention_out or down, one chunk of K per cluster -> chunk sums, added by T where the next launch reads them
//
// Rules: every token is the newest of its own sequence; weights travel to shared memory while the previous launch still
// runs; sums are those of linear.cu and attention.cu, only their place differs. Needs WIDTH == GROUP * DIM.
#if FUSED && LINKED
constexpr int THREADS = 256, CHUNK_KEYS = 256, SLOTS = 12;
constexpr int HIDDEN_CHUNKS = (HIDDEN + WIDTH - 1) / WIDTH, INNER_CHUNKS = (INTER + WIDTH - 1) / WIDTH;
constexpr int PADDED = WIDTH + 4, STREAM = HIDDEN_CHUNKS * PADDED;  // floats of a row of x in shared memory
constexpr int HEAD_COLUMNS = (GROUP + 2) * DIM;                      // q, k and v columns of one KV head
constexpr int BACK_UNITS = (HIDDEN / 8 + CLUSTER - 1) / CLUSTER;     // groups of eight columns of a block
constexpr int QKV_UNITS = (HEAD_COLUMNS / 8 * HIDDEN_CHUNKS + CLUSTER - 1) / CLUSTER;
constexpr int GATE_UNITS = (2 * WIDTH / 8 * HIDDEN_CHUNKS + CLUSTER - 1) / CLUSTER;
constexpr int UNIT = WIDTH * 8;  // floats of eight columns of one chunk
constexpr int UNITS = CLUSTER * SLOTS;
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int NEAR_KEYS = 128;  // keys that each block attends to by itself; keys whose values are staged at a time
constexpr int VALUES = NEAR_KEYS * DIM, SCORES = GROUP * CHUNK_KEYS;

struct DecodeArguments {
  const float* base;   // (M, HIDDEN) the residual stream without `parts`; null: rows of the embedding
  const float* parts;  // [chunk][M][HIDDEN] chunk sums of the product that comes on top; null: none
  float* stream;       // (M, HIDDEN) the residual stream with it
  const float* gain;
  const float* front;
  const float* bias;   // of qkv, or null
  const float* back;
  float* exchange;     // [cluster][M][HIDDEN_CHUNKS][front columns]
  float* result;       // [cluster][M][HIDDEN]
  const float* embedding;
  const int* token;
  const float* cos_sin;
  float* keys;
  float* values;
  const int* table;
  const int* sequence;
  const int* position;
  float* maxima;   // [cluster][UNITS][GROUP]
  float* sums;     // the same
  float* outputs;  // [cluster][UNITS][WIDTH]
  uint32_t* done;            // blocks of this launch that are through
  const uint32_t* previous;  // the same of the launch before; null in the first launch of a step
  uint32_t* stale[2];        // counts that nobody waits for any more; null: none
  int M, pages, expected;    // blocks of the launch before
  float eps, scale;
};

// From here on what the previous launch wrote may be read. Launches pile up while they wait: each waits for a count, not
// for the end of its predecessor, and what it waits for has waited in turn.
DEVICE void start_after(const DecodeArguments& a) {
  if (a.previous) await_count(a.previous, static_cast<uint32_t>(a.expected));
  else wait_previous();
  if (blockIdx.x == 0 && threadIdx.x == 0)
    for (int i = 0; i < 2; i++)
      if (a.stale[i]) *a.stale[i] = 0;
}

// x = base + T(parts) for all rows into shared memory; the first block of the launch writes it down too.
template <int parts, int R>
DEVICE void assemble(const DecodeArguments& a, float* x) {
  constexpr int TOGETHER = R == 1 ? 1 : parts > 4 ? 2 : 4;  // items of a thread whose loads are in flight at the same time
  for (int i0 = threadIdx.x; i0 < a.M * (HIDDEN / 4); i0 += TOGETHER * THREADS) {
    float4 v[TOGETHER], p[TOGETHER][parts];
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      const int i = i0 + n * THREADS, m = i / (HIDDEN / 4), k = i % (HIDDEN / 4) * 4;
      if (i >= a.M * (HIDDEN / 4)) continue;
      const long at = static_cast<long>(m) * HIDDEN + k;
      v[n] = a.base ? fresh4(a.base + at) : load4(a.embedding + static_cast<long>(a.token[m]) * HIDDEN + k);
      if (a.parts)
#pragma unroll
        for (int c = 0; c < parts; c++) p[n][c] = fresh4(a.parts + static_cast<long>(c) * a.M * HIDDEN + at);
    }
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      const int i = i0 + n * THREADS, m = i / (HIDDEN / 4), k = i % (HIDDEN / 4) * 4;
      if (i >= a.M * (HIDDEN / 4)) continue;
      if (a.parts) {
        v[n].x = add(v[n].x, tree_of<parts>([&](int c) { return p[n][c].x; }));
        v[n].y = add(v[n].y, tree_of<parts>([&](int c) { return p[n][c].y; }));
        v[n].z = add(v[n].z, tree_of<parts>([&](int c) { return p[n][c].z; }));
        v[n].w = add(v[n].w, tree_of<parts>([&](int c) { return p[n][c].w; }));
      }
      store4(x + m * STREAM + k / WIDTH * PADDED + k % WIDTH, v[n]);
      if (blockIdx.x == 0) store4(a.stream + static_cast<long>(m) * HIDDEN + k, v[n]);
    }
  }
}

// RMSNorm of all rows in place. `roots` holds M floats; `gain` is in shared memory.
DEVICE void normalise(const DecodeArguments& a, float* x, float* roots, const float* gain) {
  for (int m0 = 0; m0 < a.M; m0 += THREADS / 16) {
    const int m = m0 + threadIdx.x / 16;
    const float* row = x + least(m, a.M - 1) * STREAM;
    float q = 0.0f;
    if (m < a.M) {
      constexpr int AHEAD = 6;
#pragma unroll 1
      for (int k0 = threadIdx.x & 15; k0 < HIDDEN; k0 += 16 * AHEAD) {
        float v[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
          const int k = least(k0 + 16 * u, HIDDEN - 1);
          v[u] = row[k / WIDTH * PADDED + k % WIDTH];
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
          if (k0 + 16 * u < HIDDEN) q = fma(v[u], v[u], q);
      }
    }
    q = fold_lanes(q);
    if ((threadIdx.x & 15) == 0 && m < a.M) roots[m] = root(add(divide(q, static_cast<float>(HIDDEN)), a.eps));
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < a.M * HIDDEN; i += THREADS) {
    const int m = i / HIDDEN, k = i % HIDDEN;
    float* v = x + m * STREAM + k / WIDTH * PADDED + k % WIDTH;
    *v = mul(divide(*v, roots[m]), gain[k]);
  }
  __syncthreads();
}

// Chains of R rows from m0 on: x rows `pitch` floats apart against eight columns in shared memory.
template <int R, class F>
DEVICE void chains(const float* x, int pitch, int M, const float* w, int steps, const F& store) {
  for (int m0 = 0; m0 < M; m0 += R) {
    float sum[R];
    const float* row[R];
#pragma unroll
    for (int r = 0; r < R; r++) sum[r] = 0.0f, row[r] = x + least(m0 + r, M - 1) * pitch;
#pragma unroll 4
    for (int k = 0; k < steps; k++) {
      const float4 v = load4(w + k * 32);
#pragma unroll
      for (int r = 0; r < R; r++) sum[r] = chain4(load4(row[r] + k * 4), v, sum[r]);
    }
#pragma unroll
    for (int r = 0; r < R; r++)
      if (m0 + r < M) store(m0 + r, sum[r]);
  }
}

// Sends the back weights of this block: one chunk of K (of `width` columns) of BACK_UNITS groups of eight outputs.
DEVICE void send_back(const DecodeArguments& a, Delivery* delivery, float* to, int cluster, int rank, int width, int K) {
  const int count = least(BACK_UNITS, HIDDEN / 8 - rank * BACK_UNITS);
  open_delivery(delivery, (count > 0 ? count : 0) * width * 32);
  for (int u = 0; u < count; u++)
    deliver(delivery, to + u * UNIT,
            a.back + (static_cast<long>(rank * BACK_UNITS + u) * (K / 4) + cluster * (WIDTH / 4)) * 32, width * 32);
}

// attended or gated rows (in shared memory, PADDED apart) times this cluster's chunk of the back weights.
template <int R>
DEVICE void back_chains(const DecodeArguments& a, const float* rows, const float* w, int cluster, int rank, int width) {
  const int t = threadIdx.x, group = rank * BACK_UNITS + t / 8;
  if (t >= BACK_UNITS * 8 || group >= HIDDEN / 8) return;
  chains<R>(rows, PADDED, a.M, w + t / 8 * UNIT + (t & 7) * 4, width / 4, [&](int m, float y) {
    a.result[(static_cast<long>(cluster) * a.M + m) * HIDDEN + group * 8 + (t & 7)] = y;
  });
}

// q (rotated, scaled), k (rotated) and v of row m of this KV head, from the chunk sums in the exchange. `angle`: the
// cosines and sines of the row's position.
DEVICE void finish_qkv(const DecodeArguments& a, int cluster, int m, const float* angle, float* q, float* key, float* value) {
  const float* sums = a.exchange + (static_cast<long>(cluster) * a.M + m) * HIDDEN_CHUNKS * HEAD_COLUMNS;
  auto column = [&](int h, int j) {
    const float y = tree_of<HIDDEN_CHUNKS>([&](int c) { return fresh(sums + c * HEAD_COLUMNS + h * DIM + j); });
    const int head = h < GROUP ? cluster * GROUP + h : HEADS + (h - GROUP) * KV_HEADS + cluster;
    return a.bias ? add(y, a.bias[head * DIM + j]) : y;
  };
  for (int i = threadIdx.x; i < HEAD_COLUMNS / 2; i += THREADS) {
    const int h = i / (DIM / 2), j = i % (DIM / 2), j2 = j + DIM / 2;
    const float c = angle[j], s = angle[j2];
    float x = column(h, j), y = column(h, j2);
    if (h <= GROUP) {
      const float rotated = sub(mul(x, c), mul(y, s));
      y = add(mul(y, c), mul(x, s));
      x = rotated;
    }
    float* to = h < GROUP ? q + h * DIM : h == GROUP ? key : value;
    to[j] = h < GROUP ? mul(x, a.scale) : x;
    to[j2] = h < GROUP ? mul(y, a.scale) : y;
  }
}

DEVICE void store_key_value(const DecodeArguments& a, int cluster, int m, const float* key, const float* value) {
  const int* table = a.table + static_cast<long>(a.sequence[m]) * a.pages;
  float* keys = a.keys + key_at(table, a.position[m], cluster);
  float* values = a.values + value_at(table, a.position[m], cluster);
  for (int d = threadIdx.x; d < DIM; d += THREADS) {
    keys[d / 4 * KEY_STRIDE + d % 4] = key[d];
    values[d] = value[d];
  }
}

// What one block of the attention launch keeps in shared memory beside the stream.
struct AttentionSpace {
  float *q, *key, *value, *top, *total, *angle;
};

DEVICE void group_scores(const float4 (&k)[DIM / 4], const float* q, float (&s)[GROUP]) {
#pragma unroll
  for (int g = 0; g < GROUP; g++) s[g] = 0.0f;
#pragma unroll
  for (int d = 0; d < DIM / 4; d++)
#pragma unroll
    for (int g = 0; g < GROUP; g++) s[g] = chain4(load4(q + g * DIM + d * 4), k[d], s[g]);
}

// Largest of a block's scores per head, in every thread. `top` holds GROUP * 8 floats.
DEVICE void block_maxima(float (&s)[GROUP], bool here, float* top, float (&m)[GROUP]) {
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    const float w = warp_maximum(here ? s[g] : -INFINITY);
    if ((threadIdx.x & 31) == 0) top[g * 8 + threadIdx.x / 32] = w;
  }
  __syncthreads();
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    m[g] = top[g * 8];
#pragma unroll
    for (int w = 1; w < 8; w++) m[g] = top[g * 8 + w] > m[g] ? top[g * 8 + w] : m[g];
  }
}

// Lane sums of `count` weights per head into total[g]; the last warps of the block work.
DEVICE void lane_sums(const float* weight, int count, float* total) {
  const int g = (THREADS - 1 - threadIdx.x) / 32 * 2 + (threadIdx.x >> 4 & 1);
  if ((THREADS - 1 - threadIdx.x) / 32 >= (GROUP + 1) / 2) return;
  float s = 0.0f;
  if (g < GROUP)
    for (int i = threadIdx.x & 15; i < count; i += 16) s = add(s, weight[g * CHUNK_KEYS + i]);
  s = fold_lanes(s);
  if (g < GROUP && (threadIdx.x & 15) == 0) total[g] = s;
}

// P V continued over `count` keys whose values stand in shared memory.
DEVICE float weighted_values(const float* weight, const float* v, int count, float o) {
  int i = 0;
#pragma unroll 2
  for (; i + 4 <= count; i += 4) {
    const float4 w = load4(weight + i);
    o = fma(w.x, v[i * DIM], o);
    o = fma(w.y, v[(i + 1) * DIM], o);
    o = fma(w.z, v[(i + 2) * DIM], o);
    o = fma(w.w, v[(i + 3) * DIM], o);
  }
#pragma unroll 1
  for (; i < count; i++) o = fma(weight[i], v[i * DIM], o);
  return o;
}

// ---- attention of any row and length: units (row, chunk) dealt to the blocks of the cluster ------------------------------
template <class F>
DEVICE void my_units(const DecodeArguments& a, int rank, const F& work) {
  int first = 0, slot = 0;
  for (int m = 0; m < a.M; m++) {
    const int length = a.position[m] + 1, chunks = ceil_div(length, CHUNK_KEYS);
    for (int c = (rank + CLUSTER - first % CLUSTER) % CLUSTER; c < chunks; c += CLUSTER) work(m, length, chunks, first, c, slot++);
    first += chunks;
  }
}

DEVICE void far_attention(const DecodeArguments& a, int cluster, int rank, const AttentionSpace& s, float* scores, float* values,
                          float* attended) {
  const int t = threadIdx.x;
  const long units = static_cast<long>(cluster) * UNITS;
  my_units(a, rank, [&](int m, int length, int chunks, int first, int c, int slot) {
    const int* table = a.table + static_cast<long>(a.sequence[m]) * a.pages;
    const int key = c * CHUNK_KEYS + t;
    float4 k[DIM / 4];
    if (key < length - 1)
#pragma unroll
      for (int d = 0; d < DIM / 4; d++) k[d] = fresh4(a.keys + key_at(table, key, cluster) + d * KEY_STRIDE);
    __syncthreads();
    finish_qkv(a, cluster, m, a.cos_sin + static_cast<long>(length - 1) * DIM, s.q, s.key, s.value);
    __syncthreads();
    if (c == chunks - 1) store_key_value(a, cluster, m, s.key, s.value);
    if (key == length - 1)
#pragma unroll
      for (int d = 0; d < DIM / 4; d++) k[d] = load4(s.key + d * 4);
    float sum[GROUP], top[GROUP];
    if (key < length) group_scores(k, s.q, sum);
    block_maxima(sum, key < length, s.top, top);
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      scores[slot * SCORES + g * CHUNK_KEYS + t] = key < length ? sum[g] : -INFINITY;
      if (t == 0) a.maxima[(units + first + c) * GROUP + g] = top[g];
    }
  });
  cluster_barrier();
  my_units(a, rank, [&](int m, int length, int chunks, int first, int c, int slot) {
    const int* table = a.table + static_cast<long>(a.sequence[m]) * a.pages;
    const int begin = c * CHUNK_KEYS, count = least(CHUNK_KEYS, length - begin);
    float* weight = scores + slot * SCORES;
    auto fetch = [&](int from) {
      for (int i = t; i < least(NEAR_KEYS, count - from) * (DIM / 4); i += THREADS)
        copy16(values + i * 4, a.values + value_at(table, begin + from + i / (DIM / 4), cluster) + i % (DIM / 4) * 4, true);
      commit_copies();
    };
    __syncthreads();
    fetch(0);
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float top = -INFINITY;
      for (int i = 0; i < chunks; i++) {
        const float other = fresh(a.maxima + (units + first + i) * GROUP + g);
        top = other > top ? other : top;
      }
      weight[g * CHUNK_KEYS + t] = t < count ? exp1(sub(weight[g * CHUNK_KEYS + t], top)) : 0.0f;
    }
    wait_copies<0>();
    __syncthreads();
    lane_sums(weight, count, s.total);
    const int column = least(t, WIDTH - 1);
    float o = 0.0f;
    for (int from = 0; from < count; from += NEAR_KEYS) {
      if (from > 0) {
        __syncthreads();
        fetch(from);
        wait_copies<0>();
        __syncthreads();
      }
      o = weighted_values(weight + column / DIM * CHUNK_KEYS + from, values + column % DIM, least(NEAR_KEYS, count - from), o);
    }
    __syncthreads();
    if (t < WIDTH) a.outputs[(units + first + c) * WIDTH + t] = chunks > 1 ? o : divide(o, s.total[column / DIM]);
    if (t < GROUP) a.sums[(units + first + c) * GROUP + t] = s.total[t];
  });
  cluster_barrier();
  int* start = reinterpret_cast<int*>(s.q);  // first unit of each row, and of what follows the last
  if (t == 0)
    for (int m = start[0] = 0; m < a.M; m++) start[m + 1] = start[m] + a.position[m] / CHUNK_KEYS + 1;
  __syncthreads();
  constexpr int TOGETHER = 4;
  for (int i0 = t; i0 < a.M * WIDTH; i0 += TOGETHER * THREADS) {
    float o[TOGETHER];
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {  // rows of one chunk are divided already
      const int item = least(i0 + n * THREADS, a.M * WIDTH - 1);
      o[n] = fresh(a.outputs + (units + start[item / WIDTH]) * WIDTH + item % WIDTH);
    }
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      const int item = i0 + n * THREADS;
      if (item < a.M * WIDTH) attended[item / WIDTH * PADDED + item % WIDTH] = o[n];
    }
  }
#pragma unroll 1
  for (int item = t; item < a.M * WIDTH; item += THREADS) {
    const int row = item / WIDTH, i = item % WIDTH, chunks = start[row + 1] - start[row];
    const long first = units + start[row];
    if (chunks == 1) continue;
    const float output = tree_over(chunks, [&](int c) { return fresh(a.outputs + (first + c) * WIDTH + i); });
    const float sum = tree_over(chunks, [&](int c) { return fresh(a.sums + (first + c) * GROUP + i / DIM); });
    attended[row * PADDED + i] = divide(output, sum);
  }
}

template <int R>
DEVICE void attention_block(const DecodeArguments& a) {
  constexpr bool ALONE = R == 1;
  constexpr int AREA = most(QKV_UNITS * UNIT, SLOTS * SCORES), FAR = most(AREA, VALUES + SLOTS * SCORES);
  SHARED(float, area);  // front weights, later scores (and values of several rows)
  float* back = area + (ALONE ? AREA : FAR);
  float* apart = back + BACK_UNITS * UNIT;  // values of one row, fetched ahead
  float* x = apart + (ALONE ? VALUES : 0);
  float* gain = x + R * (ALONE ? 1 : 2) * most(STREAM, PADDED);
  float* weight = gain + HIDDEN;
  AttentionSpace s;
  s.q = weight + SCORES;
  s.key = s.q + GROUP * DIM;
  s.value = s.key + DIM;
  s.top = s.value + DIM;
  s.total = s.top + GROUP * 8;
  s.angle = s.total + GROUP + (GROUP & 1);
  float* roots = s.angle + DIM;
  Delivery* arrival = reinterpret_cast<Delivery*>(roots + 16);
  const int t = threadIdx.x, cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  constexpr int GROUPS = HEAD_COLUMNS / 8, ALL = GROUPS * HIDDEN_CHUNKS;
  const int mine = least(QKV_UNITS, ALL - rank * QKV_UNITS);
  auto chunk_of = [&](int u) { return (rank * QKV_UNITS + u) / GROUPS; };
  auto width_of = [&](int u) { return least(WIDTH, HIDDEN - chunk_of(u) * WIDTH); };
  if (t == 0) {
    int size = 0;
    for (int u = 0; u < mine; u++) size += width_of(u) * 32;
    open_delivery(arrival, size);
    for (int u = 0; u < mine; u++) {
      const int g = (rank * QKV_UNITS + u) % GROUPS, h = g / (DIM / 8);
      const int head = h < GROUP ? cluster * GROUP + h : HEADS + (h - GROUP) * KV_HEADS + cluster;
      const long group = static_cast<long>(head) * (DIM / 8) + g % (DIM / 8);
      deliver(arrival, area + u * UNIT, a.front + (group * (HIDDEN / 4) + chunk_of(u) * (WIDTH / 4)) * 32, width_of(u) * 32);
    }
    send_back(a, arrival + 1, back, cluster, rank, WIDTH, HEADS * DIM);
  }
  let_next_start();
  for (int k = t; k < HIDDEN; k += THREADS) gain[k] = a.gain[k];
  const int length = a.position[0] + 1;
  const bool near = ALONE && length <= NEAR_KEYS;  // then every block attends by itself
  float4 k[DIM / 4];
  if (near) {
    for (int d = t; d < DIM; d += THREADS) s.angle[d] = a.cos_sin[static_cast<long>(length - 1) * DIM + d];
    const int* table = a.table + static_cast<long>(a.sequence[0]) * a.pages;
    if (t < length - 1)
#pragma unroll
      for (int d = 0; d < DIM / 4; d++) k[d] = fresh4(a.keys + key_at(table, t, cluster) + d * KEY_STRIDE);
    for (int i = t; i < (length - 1) * (DIM / 4); i += THREADS)
      copy16(apart + i * 4, a.values + value_at(table, i / (DIM / 4), cluster) + i % (DIM / 4) * 4, true);
    commit_copies();
  }
  start_after(a);
  assemble<INNER_CHUNKS, R>(a, x);
  __syncthreads();
  normalise(a, x, roots, gain);
  await_delivery(arrival);
  if (t < mine * 8) {
    const int u = t / 8, c = chunk_of(u), g = (rank * QKV_UNITS + u) % GROUPS;
    chains<R>(x + c * PADDED, STREAM, a.M, area + u * UNIT + (t & 7) * 4, width_of(u) / 4, [&](int m, float y) {
      a.exchange[((static_cast<long>(cluster) * a.M + m) * HIDDEN_CHUNKS + c) * HEAD_COLUMNS + g * 8 + (t & 7)] = y;
    });
  }
  cluster_barrier();
  if (near) {
    finish_qkv(a, cluster, 0, s.angle, s.q, s.key, s.value);
    wait_copies<0>();
    __syncthreads();
    if (rank == 0) store_key_value(a, cluster, 0, s.key, s.value);
    for (int d = t; d < DIM; d += THREADS) apart[(length - 1) * DIM + d] = s.value[d];
    if (t == length - 1)
#pragma unroll
      for (int d = 0; d < DIM / 4; d++) k[d] = load4(s.key + d * 4);
    float sum[GROUP], top[GROUP];
    if (t < length) group_scores(k, s.q, sum);
    block_maxima(sum, t < length, s.top, top);
#pragma unroll
    for (int g = 0; g < GROUP; g++) weight[g * CHUNK_KEYS + t] = t < length ? exp1(sub(sum[g], top[g])) : 0.0f;
    __syncthreads();
    lane_sums(weight, length, s.total);
    for (int i = t; i < WIDTH; i += THREADS)
      x[i] = weighted_values(weight + i / DIM * CHUNK_KEYS, apart + i % DIM, length, 0.0f);
    __syncthreads();
    for (int i = t; i < WIDTH; i += THREADS) x[i] = divide(x[i], s.total[i / DIM]);
  } else {
    far_attention(a, cluster, rank, s, ALONE ? area : area + VALUES, ALONE ? apart : area, x);
  }
  __syncthreads();
  await_delivery(arrival + 1);
  back_chains<R>(a, x, back, cluster, rank, WIDTH);
  count_off(a.done);
}

template <int R>
DEVICE void mlp_block(const DecodeArguments& a) {
  SHARED(float, front);
  float* back = front + GATE_UNITS * UNIT;
  float* x = back + BACK_UNITS * UNIT;
  float* gain = x + R * (R == 1 ? 1 : 2) * most(STREAM, PADDED);
  float* roots = gain + HIDDEN;
  Delivery* arrival = reinterpret_cast<Delivery*>(roots + 16);
  const int t = threadIdx.x, cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const int width = least(WIDTH, INTER - cluster * WIDTH), half = width / 8, groups = 2 * half;
  const int mine = least(GATE_UNITS, groups * HIDDEN_CHUNKS - rank * GATE_UNITS);
  auto chunk_of = [&](int u) { return (rank * GATE_UNITS + u) / groups; };
  auto width_of = [&](int u) { return least(WIDTH, HIDDEN - chunk_of(u) * WIDTH); };
  if (t == 0) {
    int size = 0;
    for (int u = 0; u < mine; u++) size += width_of(u) * 32;
    open_delivery(arrival, size);
    for (int u = 0; u < mine; u++) {
      const int g = (rank * GATE_UNITS + u) % groups;
      const long group = g < half ? cluster * (WIDTH / 8) + g : (INTER + cluster * WIDTH) / 8 + g - half;
      deliver(arrival, front + u * UNIT, a.front + (group * (HIDDEN / 4) + chunk_of(u) * (WIDTH / 4)) * 32, width_of(u) * 32);
    }
    send_back(a, arrival + 1, back, cluster, rank, width, INTER);
  }
  let_next_start();
  for (int k = t; k < HIDDEN; k += THREADS) gain[k] = a.gain[k];
  start_after(a);
  assemble<KV_HEADS, R>(a, x);
  __syncthreads();
  normalise(a, x, roots, gain);
  await_delivery(arrival);
  float* exchange = a.exchange + static_cast<long>(cluster) * a.M * HIDDEN_CHUNKS * 2 * WIDTH;
  if (t < mine * 8) {
    const int u = t / 8, c = chunk_of(u), g = (rank * GATE_UNITS + u) % groups;
    chains<R>(x + c * PADDED, STREAM, a.M, front + u * UNIT + (t & 7) * 4, width_of(u) / 4, [&](int m, float y) {
      exchange[(static_cast<long>(m) * HIDDEN_CHUNKS + c) * 2 * WIDTH + g * 8 + (t & 7)] = y;
    });
  }
  cluster_barrier();
  constexpr int TOGETHER = R == 1 ? 1 : 4;
  for (int i0 = t; i0 < a.M * width; i0 += TOGETHER * THREADS) {
    float gate[TOGETHER], up[TOGETHER];
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      const int i = least(i0 + n * THREADS, a.M * width - 1);
      const float* sums = exchange + static_cast<long>(i / width) * HIDDEN_CHUNKS * 2 * WIDTH + i % width;
      gate[n] = tree_of<HIDDEN_CHUNKS>([&](int c) { return fresh(sums + c * 2 * WIDTH); });
      up[n] = tree_of<HIDDEN_CHUNKS>([&](int c) { return fresh(sums + c * 2 * WIDTH + width); });
    }
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      const int i = i0 + n * THREADS;
      if (i < a.M * width) x[i / width * PADDED + i % width] = swiglu(gate[n], up[n]);
    }
  }
  __syncthreads();
  await_delivery(arrival + 1);
  back_chains<R>(a, x, back, cluster, rank, width);
  count_off(a.done);
}

KERNEL(decode_attention_1, DecodeArguments, THREADS) { attention_block<1>(a); }
KERNEL(decode_attention_8, DecodeArguments, THREADS) { attention_block<8>(a); }
KERNEL(decode_mlp_1, DecodeArguments, THREADS) { mlp_block<1>(a); }
KERNEL(decode_mlp_8, DecodeArguments, THREADS) { mlp_block<8>(a); }

struct FinishArguments {
  const float* base;
  const float* parts;  // [INNER_CHUNKS][M][HIDDEN]
  const float* gain;
  const int* row;
  float* out;
  int M;
  float eps;
};
// The last norm, for the rows whose logits are wanted.
KERNEL(decode_finish, FinishArguments, 128) {
  SHARED(float, x);
  const int t = threadIdx.x, m = a.row[blockIdx.x];
  let_next_start();
  wait_previous();
  for (int k = t; k < HIDDEN; k += 128) {
    const long at = static_cast<long>(m) * HIDDEN + k;
    x[k] = add(fresh(a.base + at),
               tree_of<INNER_CHUNKS>([&](int c) { return fresh(a.parts + static_cast<long>(c) * a.M * HIDDEN + at); }));
  }
  __syncthreads();
  root_mean_square(x, HIDDEN, a.eps, x + HIDDEN);
  __syncthreads();
  for (int k = t; k < HIDDEN; k += 128)
    a.out[static_cast<long>(blockIdx.x) * HIDDEN + k] = mul(divide(x[k], x[HIDDEN]), a.gain[k]);
}
#endif

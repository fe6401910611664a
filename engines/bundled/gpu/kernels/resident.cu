// A decode step of one row with all layers in one launch: blocks stay, and each fetches its part of the next layer's
// weights as soon as it has used this layer's.
//
//   attention clusters (one per KV head) and MLP clusters (one per chunk of the inner width) take turns, as in decode.cu
//   between them: three floats and their epoch in one access of global memory, polled by whoever needs them; no fence
//   inside a cluster: a float and its epoch from shared memory to shared memory; a block has whole columns and adds their
//   chunks
//
// What has an epoch may be written over without asking: its writer has seen sums that every block of the other kind makes
// from what it read of the epoch before. Rules: all blocks run at the same time and each has columns of the second product
// (the host sees to both); sums are those of decode.cu.
#if FUSED && LINKED
constexpr int STEPS = WIDTH / 4;
constexpr int BACK_COLUMNS = BACK_UNITS * 8, BACK_WARPS = (BACK_COLUMNS + 23) / 24;  // 24 columns of a warp: 8 triples
constexpr int BLOCK_TRIPLES = (BACK_COLUMNS + 2) / 3, TRIPLES = CLUSTER * BLOCK_TRIPLES;  // of a row of HIDDEN columns
constexpr int MINE = (TRIPLES + THREADS - 1) / THREADS;
constexpr bool EVEN_TRIPLES = BACK_COLUMNS % 3 == 0 && BACK_COLUMNS * CLUSTER == HIDDEN;  // none is short
constexpr bool EVEN_HIDDEN = HIDDEN % WIDTH == 0, EVEN_INNER = INTER % WIDTH == 0;  // no short chunk
constexpr int HEAD_GROUPS = (HEAD_COLUMNS / 8 + CLUSTER - 1) / CLUSTER;  // groups of eight columns of a block: of q, k, v
constexpr int HALF_GROUPS = (WIDTH / 8 + CLUSTER - 1) / CLUSTER;         // and of gate; as many of up
constexpr int OWN = (WIDTH + CLUSTER - 1) / CLUSTER;  // attended columns whose chunks of keys a block adds
constexpr int GROUP_FLOATS = HIDDEN * 8, DEEP = HIDDEN / 16;
constexpr int PITCH = 4 * ((DEEP + 3) / 4 | 1);  // floats from one lane of RMSNorm to the next
constexpr int NEAR_HELD = least(STEPS, 12), FAR_HELD = least(STEPS, 4), GATE_HELD = least(STEPS, 20), BACK_HELD = least(STEPS, 12);

struct ResidentLayer {
  const float *attention_gain, *qkv, *bias, *attention_out, *mlp_gain, *gate_up, *down;
  float *keys, *values;
};
struct ResidentArguments {
  const ResidentLayer* layers;
  const float* embedding;
  const int* token;
  const float* cos_sin;
  const int* table;
  const int* sequence;
  const int* position;
  uint64_t* begin;     // [M][TRIPLES][2] the residual stream before attention
  uint64_t* middle;    // [M][TRIPLES][2] and before the MLP
  uint64_t* attended;  // [KV_HEADS][M][TRIPLES][2] chunk sums of attention_out
  uint64_t* gated;     // [INNER_CHUNKS][M][TRIPLES][2] chunk sums of down
  const float* gain;   // of the last norm
  const int* row;      // which rows are wanted
  float* out;          // [rows][HIDDEN] with the last norm; null: none
  uint32_t* epoch;     // layers computed by all steps so far
  int count, pages, M, rows;
  float eps, scale;
};

// The columns of this thread's triples: work(n, j, column).
template <class F>
DEVICE void each_column(const F& work) {
#pragma unroll
  for (int n = 0; n < MINE; n++) {
    const int i = threadIdx.x + n * THREADS, block = i / BLOCK_TRIPLES, from = i % BLOCK_TRIPLES * 3;
#pragma unroll
    for (int j = 0; j < 3; j++) {
      const int column = EVEN_TRIPLES ? i * 3 + j : block * BACK_COLUMNS + from + j;
      if (i < TRIPLES && (EVEN_TRIPLES || (from + j < BACK_COLUMNS && column < HIDDEN))) work(n, j, column);
    }
  }
}

DEVICE float of_triple(const uint64_t (&w)[2], int j) { return j < 2 ? value_of(w[0] >> (j * 32)) : value_of(w[1]); }

// This thread's triples of base + T(parts), as soon as all of them show their epochs.
template <int parts>
DEVICE void gather(const uint64_t* base, uint32_t base_epoch, const uint64_t* sums, uint32_t epoch, float (&x)[MINE][3]) {
  uint64_t w[MINE][parts][2];
#pragma unroll
  for (int n = 0; n < MINE; n++) {
    const int i = threadIdx.x + n * THREADS;
    if (i >= TRIPLES) continue;
    uint64_t b[2];
    for (look(base + 2 * i, b); epoch_of(b[1]) != base_epoch; look(base + 2 * i, b)) look_again(base + 2 * i + 1, base_epoch);
#pragma unroll
    for (int j = 0; j < 3; j++) x[n][j] = of_triple(b, j);
#pragma unroll
    for (int c = 0; c < parts; c++) w[n][c][1] = word_of(0.0f, epoch - 1);
  }
  for (const uint64_t* missing = sums; missing;) {
    missing = nullptr;
#pragma unroll
    for (int n = 0; n < MINE; n++)
#pragma unroll
      for (int c = 0; c < parts; c++) {
        const int i = threadIdx.x + n * THREADS;
        if (i < TRIPLES && epoch_of(w[n][c][1]) != epoch) look(sums + (c * TRIPLES + i) * 2, w[n][c]);
      }
#pragma unroll
    for (int n = 0; n < MINE; n++)
#pragma unroll
      for (int c = 0; c < parts; c++) {
        const int i = threadIdx.x + n * THREADS;
        if (i < TRIPLES && epoch_of(w[n][c][1]) != epoch) missing = sums + (c * TRIPLES + i) * 2 + 1;
      }
    if (missing) look_again(missing, epoch);
  }
#pragma unroll
  for (int n = 0; n < MINE; n++)
#pragma unroll
    for (int j = 0; j < 3; j++)
      if (threadIdx.x + n * THREADS < TRIPLES)
        x[n][j] = add(x[n][j], tree_of<parts>([&](int c) { return of_triple(w[n][c], j); }));
}

// For the clusters of the other kind.
DEVICE void publish_row(uint64_t* to, const float (&x)[MINE][3], uint32_t epoch) {
#pragma unroll
  for (int n = 0; n < MINE; n++) {
    const int i = threadIdx.x + n * THREADS;
    if (i < TRIPLES) publish(to + 2 * i, x[n][0], x[n][1], x[n][2], epoch);
  }
}

// a / b, rounded once, for many a of one b: with y the rounded reciprocal of b, a quotient corrected twice is the rounded
// one (Markstein) as long as nothing comes near the ends of the exponent's range.
DEVICE bool is_moderate(float a, int exponent) {
  const int e = (__float_as_int(a) >> 23 & 255) - 127;
  return e >= -exponent && e < exponent;
}
DEVICE float moderate_quotient(float a, float b, float y) {
  float q = mul(a, y);
  q = fma(fma(-q, b, a), y, q);
  return fma(fma(-q, b, a), y, q);
}

// RMSNorm of the columns that the threads hold, into `row`, chunks PADDED apart. Every half-warp adds the squares.
DEVICE void normalise_triples(const float (&x)[MINE][3], const float (&gain)[MINE][3], float eps, float* lanes, float* row) {
  each_column([&](int n, int j, int k) { lanes[k % 16 * PITCH + k / 16] = x[n][j]; });
  __syncthreads();
  const float* lane = lanes + (threadIdx.x & 15) * PITCH;
  float q = 0.0f;
#pragma unroll 12
  for (int d = 0; d < DEEP / 4; d++) {
    const float4 v = load4(lane + 4 * d);
    q = chain4(v, v, q);
  }
#pragma unroll
  for (int d = DEEP / 4 * 4; d < DEEP; d++) q = fma(lane[d], lane[d], q);
  q = __shfl_sync(0xffffffffu, fold_lanes(q), 0);
  constexpr float WHOLE = HIDDEN, PART = 1.0f / WHOLE;
  const float mean = is_moderate(q, 80) ? moderate_quotient(q, WHOLE, PART) : divide(q, WHOLE);
  const float r = root(add(mean, eps)), y = divide(1.0f, r);
  float v[MINE][3];
  bool all = is_moderate(r, 40);
  each_column([&](int n, int j, int) { all = all && is_moderate(x[n][j], 80); });
  if (all) each_column([&](int n, int j, int) { v[n][j] = moderate_quotient(x[n][j], r, y); });
  else each_column([&](int n, int j, int) { v[n][j] = divide(x[n][j], r); });
  each_column([&](int n, int j, int k) { row[k / WIDTH * PADDED + k % WIDTH] = mul(v[n][j], gain[n][j]); });
  __syncthreads();
}

// A chain over eight columns in shared memory of which the first steps are in registers already.
template <int HELD>
DEVICE void hold(const float* w, int steps, float4 (&held)[HELD]) {
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (k < steps) held[k] = load4(w + k * 32);
}
template <int HELD, bool EVEN>
DEVICE float held_chain(const float* x, const float4 (&held)[HELD], const float* w, int steps) {
  const int n = EVEN ? STEPS : steps;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (k < n) sum = chain4(load4(x + k * 4), held[k], sum);
#pragma unroll 12
  for (int k = HELD; k < n; k++) sum = chain4(load4(x + k * 4), load4(w + k * 32), sum);
  return sum;
}

// A thread of the last warp fetches weights: `count` pieces of `size` bytes, where piece(u, to, from) says which.
template <class F>
DEVICE void fetch_weights(Delivery* delivery, bool first, int count, int size, const F& piece) {
  if (threadIdx.x != THREADS - 32) return;
  if (first) open_delivery(delivery, count * size);
  else expect_delivery(delivery, count * size);
#pragma unroll 1
  for (int u = 0; u < count; u++) {
    float* to;
    const float* from;
    piece(u, to, from);
    deliver(delivery, to, from, size);
  }
}

// One chunk of K (of `width` columns) of this block's outputs, of a matrix with K columns.
DEVICE void fetch_back(const float* weight, Delivery* delivery, bool first, float* to, int cluster, int rank, int width, int K) {
  const int count = least(BACK_UNITS, HIDDEN / 8 - rank * BACK_UNITS);
  fetch_weights(delivery, first, count > 0 ? count : 0, width * 32, [&](int u, float*& there, const float*& from) {
    there = to + u * UNIT;
    from = weight + (static_cast<long>(rank * BACK_UNITS + u) * (K / 4) + cluster * (WIDTH / 4)) * 32;
  });
}

// This thread's column of the back product: its number within the block, its weights, and whether there is such a column.
// Threads without one read some weights, too: registers that are set in a branch would live through the loop.
struct BackColumn {
  int column, place;
  bool real;
  DEVICE BackColumn(int rank)
      : column(threadIdx.x / 32 * 24 + (threadIdx.x & 31)),
        place(least(column, BACK_COLUMNS - 1) / 8 * UNIT + (column & 7) * 4),
        real((threadIdx.x & 31) < 24 && column < BACK_COLUMNS && rank * BACK_COLUMNS + column < HIDDEN) {}
};

// The threads' columns as triples, one thread of three; whole warps call it.
DEVICE void publish_columns(uint64_t* to, int rank, const BackColumn& b, float y, uint32_t epoch) {
  if (threadIdx.x / 32 >= BACK_WARPS) return;
  const float second = __shfl_down_sync(0xffffffffu, y, 1, 32), third = __shfl_down_sync(0xffffffffu, y, 2, 32);
  if (b.real && b.column % 3 == 0) publish(to + (rank * BLOCK_TRIPLES + b.column / 3) * 2, y, second, third, epoch);
}

DEVICE float await_word(const uint64_t* p, uint32_t epoch) {
  uint64_t word;
  for (word = hear(p); epoch_of(word) != epoch; word = hear(p)) look_again(p, epoch);
  return value_of(word);
}

// `count` values from position `begin` on, without waiting for them.
DEVICE void fetch_values(float* to, const float* cache, const int* table, int begin, int count, int cluster) {
  for (int j = threadIdx.x; j < count * (DIM / 4); j += THREADS)
    copy16(to + j * 4, cache + value_at(table, begin + j / (DIM / 4), cluster) + j % (DIM / 4) * 4, true);
  commit_copies();
}

// q (rotated, scaled), k (rotated) and v of this KV head, from the words of the cluster's blocks.
DEVICE void hear_qkv(const uint64_t* words, uint32_t epoch, float scale, const AttentionSpace& s) {
  for (int i = threadIdx.x; i < HEAD_COLUMNS / 2; i += THREADS) {
    const int h = i / (DIM / 2), j = i % (DIM / 2), j2 = j + DIM / 2;
    const float c = s.angle[j], z = s.angle[j2];
    float x = await_word(words + h * DIM + j, epoch), y = await_word(words + h * DIM + j2, epoch);
    if (h <= GROUP) {
      const float rotated = sub(mul(x, c), mul(y, z));
      y = add(mul(y, c), mul(x, z));
      x = rotated;
    }
    float* to = h < GROUP ? s.q + h * DIM : h == GROUP ? s.key : s.value;
    to[j] = h < GROUP ? mul(x, scale) : x;
    to[j2] = h < GROUP ? mul(y, scale) : y;
  }
}

// Up to NEAR_KEYS keys, the last of them this token's: thread t has key t in `k`, values stand in shared memory.
DEVICE void near_attention(float4 (&k)[DIM / 4], int length, const AttentionSpace& s, float* values, float* weight, float* attended) {
  const int t = threadIdx.x;
  for (int d = t; d < DIM; d += THREADS) values[(length - 1) * DIM + d] = s.value[d];
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
  const int column = least(t, WIDTH - 1);
  const float o = weighted_values(weight + column / DIM * CHUNK_KEYS, values + column % DIM, length, 0.0f);
  __syncthreads();
  if (t < WIDTH) attended[t] = divide(o, s.total[t / DIM]);
}

// Up to CLUSTER chunks of keys, one to a block: maxima and sums are told to all blocks, outputs to those that add them up.
struct WideSpace {
  uint64_t *peaks, *totals;   // [CLUSTER][GROUP] of the chunks
  uint64_t *outputs, *shares;  // [CLUSTER][OWN] columns of this block, [WIDTH] those of all blocks
};

// T over `count` words, `stride` apart, of at most CLUSTER: neighbours pair up, an odd last one is carried.
DEVICE float tree_of_words(const uint64_t* words, int stride, int count, uint32_t epoch) {
  float v[CLUSTER];
#pragma unroll
  for (int i = 0; i < CLUSTER; i++) v[i] = i < count ? await_word(words + i * stride, epoch) : 0.0f;
#pragma unroll
  for (int width = CLUSTER; width > 1; width = (width + 1) / 2, count = (count + 1) / 2)
#pragma unroll
    for (int i = 0; i < (width + 1) / 2; i++) v[i] = 2 * i + 1 < count ? add(v[2 * i], v[2 * i + 1]) : v[2 * i];
  return v[0];
}

DEVICE void wide_attention(float4 (&k)[DIM / 4], int length, int rank, uint32_t epoch, const AttentionSpace& s,
                           const WideSpace& wide, float* values, float* weight, float* attended) {
  const int t = threadIdx.x, lane = t & 31, chunks = ceil_div(length, CHUNK_KEYS);
  const int count = least(CHUNK_KEYS, length - rank * CHUNK_KEYS);
  if (rank < chunks) {
    if (rank == chunks - 1) {
      for (int d = t; d < DIM; d += THREADS) values[(count - 1) * DIM + d] = s.value[d];
      if (t == count - 1)
#pragma unroll
        for (int d = 0; d < DIM / 4; d++) k[d] = load4(s.key + d * 4);
    }
    float sum[GROUP], top[GROUP];
    group_scores(k, s.q, sum);
    block_maxima(sum, t < count, s.top, top);
    for (int i = t; i < chunks * GROUP; i += THREADS) {
      const float* tops = s.top + i % GROUP * 8;
      float m = tops[0];
#pragma unroll
      for (int w = 1; w < 8; w++) m = tops[w] > m ? tops[w] : m;
      tell(wide.peaks + rank * GROUP + i % GROUP, i / GROUP, word_of(m, epoch));
    }
    for (int i = lane; i < chunks * GROUP; i += 32) {
      const float other = await_word(wide.peaks + i, epoch);
#pragma unroll
      for (int g = 0; g < GROUP; g++) top[g] = i % GROUP == g && other > top[g] ? other : top[g];
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      const float most = warp_maximum(top[g]);
      weight[g * CHUNK_KEYS + t] = t < count ? exp1(sub(sum[g], most)) : 0.0f;
    }
    __syncthreads();
    lane_sums(weight, count, s.total);
    const int column = least(t, WIDTH - 1);
    const float o = weighted_values(weight + column / DIM * CHUNK_KEYS, values + column % DIM, count, 0.0f);
    __syncthreads();
    if (t < WIDTH) tell(wide.outputs + rank * OWN + t % OWN, t / OWN, word_of(o, epoch));
    for (int i = t; i < CLUSTER * GROUP; i += THREADS)
      tell(wide.totals + rank * GROUP + i % GROUP, i / GROUP, word_of(s.total[i % GROUP], epoch));
  }
  for (int i = t; i < CLUSTER * OWN; i += THREADS) {
    const int j = i % OWN, column = rank * OWN + j;
    if (column >= WIDTH) continue;
    const float output = tree_of_words(wide.outputs + j, OWN, chunks, epoch);
    const float sum = tree_of_words(wide.totals + column / DIM, GROUP, chunks, epoch);
    tell(wide.shares + column, i / OWN, word_of(divide(output, sum), epoch));
  }
  for (int j = t; j < WIDTH; j += THREADS) attended[j] = await_word(wide.shares + j, epoch);
}

template <bool near>
DEVICE void resident_attention(const ResidentArguments& a, int cluster, int rank, uint32_t before) {
  constexpr int HELD = near ? NEAR_HELD : FAR_HELD;
  SHARED(float, front);
  float* back = front + HEAD_GROUPS * GROUP_FLOATS;
  float* values = back + BACK_UNITS * UNIT;
  float* weight = values + 2 * VALUES;  // near: the second half is keys
  uint64_t* words = reinterpret_cast<uint64_t*>(weight + SCORES);  // [HEAD_COLUMNS]
  WideSpace wide;
  wide.peaks = words + HEAD_COLUMNS;
  wide.totals = wide.peaks + CLUSTER * GROUP;
  wide.outputs = wide.totals + CLUSTER * GROUP;
  wide.shares = wide.outputs + CLUSTER * OWN;
  constexpr int ALL_WORDS = HEAD_COLUMNS + CLUSTER * (2 * GROUP + OWN) + WIDTH;
  float* x = reinterpret_cast<float*>(words + ALL_WORDS + (ALL_WORDS & 1));
  float* lanes = x + most(STREAM, PADDED);
  float* sums = lanes + 16 * PITCH;                    // [HIDDEN_CHUNKS][columns of this block]
  float* bias = sums + HEAD_GROUPS * 8 * HIDDEN_CHUNKS;  // [columns of this block]
  AttentionSpace s;
  s.q = bias + HEAD_GROUPS * 8;
  s.key = s.q + GROUP * DIM;
  s.value = s.key + DIM;
  s.top = s.value + DIM;
  s.angle = s.top + GROUP * 8;
  s.total = s.angle + DIM;
  Delivery* arrival = reinterpret_cast<Delivery*>(s.total + GROUP + (GROUP & 1));
  const int t = threadIdx.x, first = rank * HEAD_GROUPS, spare = least(HEAD_GROUPS, HEAD_COLUMNS / 8 - first);
  const int groups = HEAD_COLUMNS / 8 % CLUSTER == 0 ? HEAD_GROUPS : spare > 0 ? spare : 0, columns = groups * 8;
  const int length = a.position[0] + 1;
  const int* table = a.table + static_cast<long>(a.sequence[0]) * a.pages;
  const int begin = near ? 0 : rank * CHUNK_KEYS, before_now = length - 1 - begin;  // keys of this block, this token's aside
  const int old_keys = near ? before_now : least(CHUNK_KEYS, before_now);
  const bool has_key = t < old_keys;
  float* my_key = values + VALUES + least(t, NEAR_KEYS - 1) * 4;  // near: [DIM / 4][NEAR_KEYS][4]
  const long key_offset = has_key ? key_at(table, begin + t, cluster) : 0;
  auto head_of = [&](int column) {  // which head of all of q, k and v a column of this KV head belongs to
    const int h = column / DIM;
    return h < GROUP ? cluster * GROUP + h : HEADS + (h - GROUP) * KV_HEADS + cluster;
  };
  auto fetch_front = [&](const float* weight, bool is_first) {
    fetch_weights(arrival, is_first, groups, HIDDEN * 32, [&](int u, float*& to, const float*& from) {
      const int column = (first + u) * 8;
      to = front + u * GROUP_FLOATS;
      from = weight + static_cast<long>(head_of(column) * DIM + column % DIM) * HIDDEN;
    });
  };
  for (int i = t; i < ALL_WORDS; i += THREADS) words[i] = word_of(0.0f, before);
  for (int d = t; d < DIM; d += THREADS) s.angle[d] = a.cos_sin[static_cast<long>(length - 1) * DIM + d];
  fetch_front(a.layers[0].qkv, true);
  fetch_back(a.layers[0].attention_out, arrival + 1, true, back, cluster, rank, WIDTH, HEADS * DIM);
  cluster_barrier();  // nobody writes into a block that has not begun
  const BackColumn b(rank);
  const int unit = t / 8, chunk = groups ? least(unit / groups, HIDDEN_CHUNKS - 1) : 0, steps = least(WIDTH, HIDDEN - chunk * WIDTH) / 4;
  const bool has_front = t < columns * HIDDEN_CHUNKS, has_back = b.real;
  const float* w = front + (groups ? unit % groups : 0) * GROUP_FLOATS + chunk * UNIT + (t & 7) * 4;
  const float* w_back = back + b.place;
  const float* token = a.embedding + static_cast<long>(a.token[0]) * HIDDEN;
  for (int i = 0; i < a.count; i++) {
    // stage 0: begin
    const ResidentLayer l = a.layers[i];
    const bool more = i + 1 < a.count;
    const float *next_front = a.layers[more ? i + 1 : i].qkv, *next_back = a.layers[more ? i + 1 : i].attention_out;
    const uint32_t epoch = before + i + 1, parity = i & 1;
    float gain[MINE][3], v[MINE][3];
    each_column([&](int n, int j, int k) { gain[n][j] = l.attention_gain[k]; });
    if (t < columns) bias[t] = l.bias ? l.bias[head_of(first * 8 + t) * DIM + (first * 8 + t) % DIM] : 0.0f;
    float4 held[HELD], held_back[BACK_HELD];
    float4 k[DIM / 4];
    if constexpr (!near) {
#pragma unroll
      for (int d = 0; d < DIM / 4; d++) {
        k[d] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (has_key) k[d] = fresh4(l.keys + key_offset + d * KEY_STRIDE);
      }
    } else if (has_key) {
#pragma unroll 4
      for (int d = 0; d < DIM / 4; d++) copy16(my_key + d * NEAR_KEYS * 4, l.keys + key_offset + d * KEY_STRIDE, true);
    }
    fetch_values(values, l.values, table, begin, old_keys, cluster);
    await_delivery(arrival, parity);
    hold(w, steps, held);
    // stage 1: weights
    if (i == 0) each_column([&](int n, int j, int c) { v[n][j] = token[c]; });
    else gather<INNER_CHUNKS>(a.begin, epoch - 1, a.gated, epoch - 1, v);
    // stage 2: gathered
    if (cluster == 0 && rank == 0) publish_row(a.middle, v, epoch);
    normalise_triples(v, gain, a.eps, lanes, x);
    // stage 3: normalised
    if (has_front) sums[t] = held_chain<HELD, EVEN_HIDDEN>(x + chunk * PADDED, held, w, steps);
    __syncthreads();
    // stage 4: first product
    if (more) fetch_front(next_front, false);
    for (int item = t; item < CLUSTER * columns; item += THREADS) {
      const int j = item % columns;
      float y = tree_of<HIDDEN_CHUNKS>([&](int c) { return sums[c * columns + j]; });
      if (l.bias) y = add(y, bias[j]);
      tell(words + first * 8 + j, item / columns, word_of(y, epoch));
    }
    // stage 5: told
    await_delivery(arrival + 1, parity);
    wait_copies<0>();
    if constexpr (near) {
#pragma unroll  // which this thread has copied itself
      for (int n = 0; n < DIM / 4; n++) k[n] = load4(my_key + n * NEAR_KEYS * 4);
      hear_qkv(words, epoch, a.scale, s);
      __syncthreads();
      // stage 6: heard
      near_attention(k, length, s, values, weight, x);
    } else {
      hear_qkv(words, epoch, a.scale, s);
      __syncthreads();
      // stage 6: heard
      wide_attention(k, length, rank, epoch, s, wide, values, weight, x);
    }
    hold(w_back, STEPS, held_back);
    __syncthreads();
    // stage 7: attended
    const float y = has_back ? held_chain<BACK_HELD, true>(x, held_back, w_back, STEPS) : 0.0f;
    publish_columns(a.attended + cluster * TRIPLES * 2, rank, b, y, epoch);
    // stage 8: published
    __syncthreads();
    if (more) fetch_back(next_back, arrival + 1, false, back, cluster, rank, WIDTH, HEADS * DIM);
    if (rank == 0) {
      float *key = l.keys + key_at(table, length - 1, cluster), *value = l.values + value_at(table, length - 1, cluster);
      for (int d = t; d < DIM; d += THREADS) key[d / 4 * KEY_STRIDE + d % 4] = s.key[d], value[d] = s.value[d];
    }
  }
  if (cluster > 0 || rank > 0 || !a.out) return;
  const uint32_t last = before + a.count;
  float gain[MINE][3], v[MINE][3];
  each_column([&](int n, int j, int c) { gain[n][j] = a.gain[c]; });
  gather<INNER_CHUNKS>(a.begin, last, a.gated, last, v);
  normalise_triples(v, gain, a.eps, lanes, x);
  each_column([&](int, int, int c) { a.out[c] = x[c / WIDTH * PADDED + c % WIDTH]; });
}

DEVICE void resident_mlp(const ResidentArguments& a, int cluster, int rank, uint32_t before) {
  SHARED(float, front);
  float* back = front + 2 * HALF_GROUPS * GROUP_FLOATS;
  uint64_t* words = reinterpret_cast<uint64_t*>(back + BACK_UNITS * UNIT);  // [WIDTH]
  float* x = reinterpret_cast<float*>(words + WIDTH);
  float* lanes = x + most(STREAM, PADDED);
  float* sums = lanes + 16 * PITCH;  // [HIDDEN_CHUNKS][gate and up columns of this block]
  Delivery* arrival = reinterpret_cast<Delivery*>(sums + 2 * HALF_GROUPS * 8 * HIDDEN_CHUNKS);
  const int t = threadIdx.x, width = EVEN_INNER ? WIDTH : least(WIDTH, INTER - cluster * WIDTH);
  const int first = rank * HALF_GROUPS, spare = least(HALF_GROUPS, width / 8 - first);
  const int half = EVEN_INNER && WIDTH / 8 % CLUSTER == 0 ? HALF_GROUPS : spare > 0 ? spare : 0, columns = half * 8;
  auto fetch_front = [&](const float* weight, bool is_first) {
    fetch_weights(arrival, is_first, 2, half * HIDDEN * 32, [&](int u, float*& to, const float*& from) {
      to = front + u * half * GROUP_FLOATS;
      from = weight + static_cast<long>(u * INTER + cluster * WIDTH + first * 8) * HIDDEN;
    });
  };
  for (int i = t; i < WIDTH; i += THREADS) words[i] = word_of(0.0f, before);
  fetch_front(a.layers[0].gate_up, true);
  fetch_back(a.layers[0].down, arrival + 1, true, back, cluster, rank, width, INTER);
  cluster_barrier();
  const BackColumn b(rank);
  const int unit = t / 8, chunk = half ? least(unit / (2 * half), HIDDEN_CHUNKS - 1) : 0, steps = least(WIDTH, HIDDEN - chunk * WIDTH) / 4;
  const bool has_front = t < 2 * columns * HIDDEN_CHUNKS;
  const bool has_back = b.real;
  const float* w = front + (half ? unit % (2 * half) : 0) * GROUP_FLOATS + chunk * UNIT + (t & 7) * 4;
  const float* w_back = back + b.place;
  for (int i = 0; i < a.count; i++) {
    const bool more = i + 1 < a.count;
    // stage 0: begin
    const float* gains = a.layers[i].mlp_gain;
    const float *next_front = a.layers[more ? i + 1 : i].gate_up, *next_back = a.layers[more ? i + 1 : i].down;
    const uint32_t epoch = before + i + 1, parity = i & 1;
    float gain[MINE][3], v[MINE][3];
    each_column([&](int n, int j, int k) { gain[n][j] = gains[k]; });
    float4 held[GATE_HELD], held_back[BACK_HELD];
    await_delivery(arrival, parity);
    hold(w, steps, held);
    // stage 1: weights
    gather<KV_HEADS>(a.middle, epoch, a.attended, epoch, v);
    // stage 2: gathered
    if (cluster == 0 && rank == 0) {
      publish_row(a.begin, v, epoch);
      if (t == 0 && !more) *a.epoch = epoch;  // with two layers or more, every block has read it
    }
    normalise_triples(v, gain, a.eps, lanes, x);
    // stage 3: normalised
    if (has_front) sums[t] = held_chain<GATE_HELD, EVEN_HIDDEN>(x + chunk * PADDED, held, w, steps);
    __syncthreads();
    // stage 4: first product
    if (more) fetch_front(next_front, false);
    for (int item = t; item < CLUSTER * columns; item += THREADS) {
      const int j = item % columns;
      const float gate = tree_of<HIDDEN_CHUNKS>([&](int c) { return sums[c * 2 * columns + j]; });
      const float up = tree_of<HIDDEN_CHUNKS>([&](int c) { return sums[c * 2 * columns + columns + j]; });
      tell(words + first * 8 + j, item / columns, word_of(swiglu(gate, up), epoch));
    }
    // stage 5: told
    await_delivery(arrival + 1, parity);
    hold(w_back, width / 4, held_back);
    for (int j = t; j < width; j += THREADS) x[j] = await_word(words + j, epoch);
    __syncthreads();
    // stage 6: heard
    // stage 7: attended
    const float y = has_back ? held_chain<BACK_HELD, EVEN_INNER>(x, held_back, w_back, width / 4) : 0.0f;
    publish_columns(a.gated + cluster * TRIPLES * 2, rank, b, y, epoch);
    // stage 8: published
    __syncthreads();
    if (more) fetch_back(next_back, arrival + 1, false, back, cluster, rank, width, INTER);
  }
}

// A block's shared memory has to last until all that others of its cluster tell it has arrived.
DEVICE void leave_together() {
  __syncthreads();
  cluster_barrier();
}

template <bool near>
DEVICE void resident_block(const ResidentArguments& a) {
  const int cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  let_next_start();
  wait_previous();
  const uint32_t before = *a.epoch;
  if (cluster < KV_HEADS) resident_attention<near>(a, cluster, rank, before);
  else resident_mlp(a, cluster - KV_HEADS, rank, before);
  leave_together();
}
RESIDENT_KERNEL(decode_resident_near, ResidentArguments, THREADS) { resident_block<true>(a); }
RESIDENT_KERNEL(decode_resident_far, ResidentArguments, THREADS) { resident_block<false>(a); }
#endif

// A decode step of 2 to 4 rows with all layers in one launch: resident.cu with rows.
//
//   a unit = (row, chunk of keys); each block of an attention cluster has one unit at most (the host sees to it)
//   rows are told to the blocks that have their units; attended rows and the MLP's columns to all blocks of the cluster
#if FUSED && LINKED
constexpr int MOST_ROWS = 4;
constexpr int FRONT_HEAD = HEAD_GROUPS * 8 * HIDDEN_CHUNKS, FRONT_GATE = 2 * HALF_GROUPS * 8 * HIDDEN_CHUNKS;  // chains

// Rows of base + T(parts) into x, some of a thread's triples at a time; `say` gets each triple, too.
template <int parts, int R, class F>
DEVICE void gather_rows(const uint64_t* base, uint32_t base_epoch, const uint64_t* sums, uint32_t epoch, int M, float* x,
                        const F& say) {
  constexpr int TOGETHER = parts > 4 || R == 2 ? 2 : R == 4 ? 3 : 6;
  for (int i0 = threadIdx.x; i0 < M * TRIPLES; i0 += TOGETHER * THREADS) {
    uint64_t b[TOGETHER][2], w[TOGETHER][parts][2];
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      b[n][1] = word_of(0.0f, base_epoch - 1);
#pragma unroll
      for (int c = 0; c < parts; c++) w[n][c][1] = word_of(0.0f, epoch - 1);
    }
    for (const uint64_t* missing = base; missing;) {
      missing = nullptr;
      uint32_t wanted = epoch;
#pragma unroll
      for (int n = 0; n < TOGETHER; n++) {
        const int i = i0 + n * THREADS;
        if (i >= M * TRIPLES) continue;
        if (base && epoch_of(b[n][1]) != base_epoch) look(base + 2 * i, b[n]);
#pragma unroll
        for (int c = 0; c < parts; c++)
          if (base && epoch_of(w[n][c][1]) != epoch) look(sums + (c * M * TRIPLES + i) * 2, w[n][c]);
      }
#pragma unroll
      for (int n = 0; n < TOGETHER; n++) {
        const int i = i0 + n * THREADS;
        if (i >= M * TRIPLES || !base) continue;
        if (epoch_of(b[n][1]) != base_epoch) missing = base + 2 * i + 1, wanted = base_epoch;
#pragma unroll
        for (int c = 0; c < parts; c++)
          if (epoch_of(w[n][c][1]) != epoch) missing = sums + (c * M * TRIPLES + i) * 2 + 1, wanted = epoch;
      }
      if (missing) look_again(missing, wanted);
    }
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      const int i = i0 + n * THREADS;
      if (i >= M * TRIPLES) continue;
      const int m = i / TRIPLES, place = i % TRIPLES, from = place % BLOCK_TRIPLES * 3;
      float v[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < 3; j++) {
        const int k = place / BLOCK_TRIPLES * BACK_COLUMNS + from + j;
        if (from + j >= BACK_COLUMNS || k >= HIDDEN) continue;
        float* to = x + m * STREAM + k / WIDTH * PADDED + k % WIDTH;
        v[j] = base ? add(of_triple(b[n], j), tree_of<parts>([&](int c) { return of_triple(w[n][c], j); })) : *to;
        *to = v[j];
      }
      say(i, v);
    }
  }
}

// The back product of all rows, published as triples [row][TRIPLES]; all threads of its warps work.
template <int R>
DEVICE void back_rows(const float* x, const float* w, int steps, int M, uint64_t* to, int rank, const BackColumn& b,
                      uint32_t epoch) {
  if (threadIdx.x / 32 >= BACK_WARPS) return;
  chains<R>(x, PADDED, M, w, steps, [&](int m, float y) { publish_columns(to + m * TRIPLES * 2, rank, b, y, epoch); });
}

struct Units {
  int first[MOST_ROWS + 1];  // unit, which is also the block, of each row's first chunk; then the number of units
};

// This block's unit: scores, weights, P V; maxima and sums to the row's blocks, outputs to those that add them up.
DEVICE void unit_attention(float4 (&k)[DIM / 4], int length, int chunk, int chunks, int first, int rank, uint32_t epoch,
                           const AttentionSpace& s, const WideSpace& wide, float* values, float* weight, const float* cache,
                           const int* table, int cluster) {
  const int t = threadIdx.x, lane = t & 31, begin = chunk * CHUNK_KEYS, count = least(CHUNK_KEYS, length - begin);
  if (begin + t == length - 1)
#pragma unroll
    for (int d = 0; d < DIM / 4; d++) k[d] = load4(s.key + d * 4);
  float sum[GROUP], top[GROUP];
  group_scores(k, s.q, sum);
  block_maxima(sum, t < count, s.top, top);
  for (int i = t; i < chunks * GROUP; i += THREADS) {
    const float* tops = s.top + i % GROUP * 8;
    float m = tops[0];
#pragma unroll
    for (int w = 1; w < 8; w++) m = tops[w] > m ? tops[w] : m;
    tell(wide.peaks + rank * GROUP + i % GROUP, first + i / GROUP, word_of(m, epoch));
  }
  for (int i = lane; i < chunks * GROUP; i += 32) {
    const float other = await_word(wide.peaks + first * GROUP + i, epoch);
#pragma unroll
    for (int g = 0; g < GROUP; g++) top[g] = i % GROUP == g && other > top[g] ? other : top[g];
  }
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    const float most = warp_maximum(top[g]);
    weight[g * CHUNK_KEYS + t] = t < count ? exp1(sub(sum[g], most)) : 0.0f;
  }
  const int column = least(t, WIDTH - 1);
  float o = 0.0f;
  for (int from = 0; from < count; from += NEAR_KEYS) {
    if (from > 0) {
      __syncthreads();
      fetch_values(values, cache, table, begin + from, least(NEAR_KEYS, length - 1 - begin - from), cluster);
    }
    wait_copies<0>();
    const int newest = length - 1 - begin - from;
    if (newest < NEAR_KEYS)
      for (int d = t; d < DIM; d += THREADS) values[newest * DIM + d] = s.value[d];
    __syncthreads();
    if (from == 0) lane_sums(weight, count, s.total);
    o = weighted_values(weight + column / DIM * CHUNK_KEYS + from, values + column % DIM, least(NEAR_KEYS, count - from), o);
  }
  __syncthreads();
  if (t < WIDTH) tell(wide.outputs + rank * OWN + t % OWN, t / OWN, word_of(o, epoch));
  for (int i = t; i < CLUSTER * GROUP; i += THREADS)
    tell(wide.totals + rank * GROUP + i % GROUP, i / GROUP, word_of(s.total[i % GROUP], epoch));
}

template <int R>
DEVICE void attention_rows(const ResidentArguments& a, int cluster, int rank, uint32_t before) {
  SHARED(float, front);
  float* back = front + HEAD_GROUPS * GROUP_FLOATS;
  float* values = back + BACK_UNITS * UNIT;
  float* weight = values + VALUES;
  uint64_t* words = reinterpret_cast<uint64_t*>(weight + SCORES);  // [HEAD_COLUMNS] of this block's row
  WideSpace wide;
  wide.peaks = words + HEAD_COLUMNS;
  wide.totals = wide.peaks + CLUSTER * GROUP;
  wide.outputs = wide.totals + CLUSTER * GROUP;
  wide.shares = wide.outputs + CLUSTER * OWN;  // [R][WIDTH]
  constexpr int ALL_WORDS = HEAD_COLUMNS + CLUSTER * (2 * GROUP + OWN) + R * WIDTH;
  float* x = reinterpret_cast<float*>(words + ALL_WORDS + (ALL_WORDS & 1));
  float* gain = x + R * most(STREAM, PADDED);
  float* sums = gain + HIDDEN;         // [R][FRONT_HEAD]
  float* bias = sums + R * FRONT_HEAD;  // [columns of this block]
  AttentionSpace s;
  s.q = bias + HEAD_GROUPS * 8;
  s.key = s.q + GROUP * DIM;
  s.value = s.key + DIM;
  s.top = s.value + DIM;
  s.angle = s.top + GROUP * 8;
  s.total = s.angle + DIM;
  float* roots = s.total + GROUP + (GROUP & 1);
  Delivery* arrival = reinterpret_cast<Delivery*>(roots + 16);
  const int t = threadIdx.x, own = rank * HEAD_GROUPS, spare = least(HEAD_GROUPS, HEAD_COLUMNS / 8 - own);
  const int groups = HEAD_COLUMNS / 8 % CLUSTER == 0 ? HEAD_GROUPS : spare > 0 ? spare : 0, columns = groups * 8;
  Units units;
  units.first[0] = 0;
#pragma unroll
  for (int m = 0; m < R; m++) units.first[m + 1] = units.first[m] + (m < a.M ? a.position[least(m, a.M - 1)] / CHUNK_KEYS + 1 : 0);
  int mine = -1, first = 0, chunks = 0;
#pragma unroll
  for (int m = 0; m < R; m++)
    if (rank >= units.first[m] && rank < units.first[m + 1]) mine = m, first = units.first[m], chunks = units.first[m + 1] - first;
  const bool has_unit = mine >= 0;
  const int length = a.position[has_unit ? mine : 0] + 1, begin = (rank - first) * CHUNK_KEYS;
  const int* table = a.table + static_cast<long>(a.sequence[has_unit ? mine : 0]) * a.pages;
  const bool has_key = has_unit && begin + t < length - 1;
  const long key_offset = has_key ? key_at(table, begin + t, cluster) : 0;
  auto head_of = [&](int column) {
    const int h = column / DIM;
    return h < GROUP ? cluster * GROUP + h : HEADS + (h - GROUP) * KV_HEADS + cluster;
  };
  auto fetch_front = [&](const float* from_layer, bool is_first) {
    fetch_weights(arrival, is_first, groups, HIDDEN * 32, [&](int u, float*& to, const float*& from) {
      const int column = (own + u) * 8;
      to = front + u * GROUP_FLOATS;
      from = from_layer + static_cast<long>(head_of(column) * DIM + column % DIM) * HIDDEN;
    });
  };
  for (int i = t; i < ALL_WORDS; i += THREADS) words[i] = word_of(0.0f, before);
  for (int d = t; d < DIM; d += THREADS) s.angle[d] = a.cos_sin[static_cast<long>(length - 1) * DIM + d];
  for (int i = t; i < a.M * HIDDEN; i += THREADS) {
    const int m = i / HIDDEN, k = i % HIDDEN;
    x[m * STREAM + k / WIDTH * PADDED + k % WIDTH] = a.embedding[static_cast<long>(a.token[m]) * HIDDEN + k];
  }
  fetch_front(a.layers[0].qkv, true);
  fetch_back(a.layers[0].attention_out, arrival + 1, true, back, cluster, rank, WIDTH, HEADS * DIM);
  cluster_barrier();
  const BackColumn b(rank);
  const int unit = t / 8, chunk = groups ? least(unit / groups, HIDDEN_CHUNKS - 1) : 0, steps = least(WIDTH, HIDDEN - chunk * WIDTH) / 4;
  const bool has_front = t < columns * HIDDEN_CHUNKS;
  const float* w = front + (groups ? unit % groups : 0) * GROUP_FLOATS + chunk * UNIT + (t & 7) * 4;
  DecodeArguments d = {};
  d.M = a.M, d.eps = a.eps;
  const long row_words = static_cast<long>(a.M) * TRIPLES * 2;
  for (int i = 0; i < a.count; i++) {
    const ResidentLayer l = a.layers[i];
    const bool more = i + 1 < a.count;
    const float *next_front = a.layers[more ? i + 1 : i].qkv, *next_back = a.layers[more ? i + 1 : i].attention_out;
    const uint32_t epoch = before + i + 1, parity = i & 1;
    for (int c = t; c < HIDDEN; c += THREADS) gain[c] = l.attention_gain[c];
    if (t < columns) bias[t] = l.bias ? l.bias[head_of(own * 8 + t) * DIM + (own * 8 + t) % DIM] : 0.0f;
    if (has_unit) fetch_values(values, l.values, table, begin, least(NEAR_KEYS, length - 1 - begin), cluster);
    gather_rows<INNER_CHUNKS, R>(i ? a.begin : nullptr, epoch - 1, a.gated, epoch - 1, a.M, x, [&](int n, const float(&v)[3]) {
      if (cluster == 0 && rank == 0) publish(a.middle + 2 * n, v[0], v[1], v[2], epoch);
    });
    __syncthreads();
    normalise(d, x, roots, gain);
    await_delivery(arrival, parity);
    if (has_front) chains<R>(x + chunk * PADDED, STREAM, a.M, w, steps, [&](int m, float y) { sums[m * FRONT_HEAD + t] = y; });
    __syncthreads();
    if (more) fetch_front(next_front, false);
    float4 k[DIM / 4];
#pragma unroll
    for (int n = 0; n < DIM / 4; n++) {
      k[n] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (has_key) k[n] = fresh4(l.keys + key_offset + n * KEY_STRIDE);
    }
    for (int item = t; item < a.M * columns; item += THREADS) {
      const int m = item / columns, j = item % columns;
      float y = tree_of<HIDDEN_CHUNKS>([&](int c) { return sums[m * FRONT_HEAD + c * columns + j]; });
      if (l.bias) y = add(y, bias[j]);
#pragma unroll
      for (int r = 0; r < R; r++)
        if (r == m)
          for (int u = units.first[r]; u < units.first[r + 1]; u++) tell(words + own * 8 + j, u, word_of(y, epoch));
    }
    await_delivery(arrival + 1, parity);
    if (has_unit) {
      hear_qkv(words, epoch, a.scale, s);
      __syncthreads();
      unit_attention(k, length, rank - first, chunks, first, rank, epoch, s, wide, values, weight, l.values, table, cluster);
    }
    for (int item = t; item < a.M * OWN; item += THREADS) {
      const int m = item / OWN, j = item % OWN, column = rank * OWN + j;
      if (column >= WIDTH) continue;
      int from = 0, to = 0;
#pragma unroll
      for (int r = 0; r < R; r++)
        if (r == m) from = units.first[r], to = units.first[r + 1];
      const float output = tree_of_words(wide.outputs + from * OWN + j, OWN, to - from, epoch);
      const float sum = tree_of_words(wide.totals + from * GROUP + column / DIM, GROUP, to - from, epoch);
      const uint64_t share = word_of(divide(output, sum), epoch);
      for (int r = 0; r < CLUSTER; r++) tell(wide.shares + m * WIDTH + column, r, share);
    }
    for (int j = t; j < a.M * WIDTH; j += THREADS) x[j / WIDTH * PADDED + j % WIDTH] = await_word(wide.shares + j, epoch);
    __syncthreads();
    back_rows<R>(x, back + b.place, STEPS, a.M, a.attended + cluster * row_words, rank, b, epoch);
    __syncthreads();
    if (more) fetch_back(next_back, arrival + 1, false, back, cluster, rank, WIDTH, HEADS * DIM);
    if (has_unit && rank == first + chunks - 1) {
      float *key = l.keys + key_at(table, length - 1, cluster), *value = l.values + value_at(table, length - 1, cluster);
      for (int c = t; c < DIM; c += THREADS) key[c / 4 * KEY_STRIDE + c % 4] = s.key[c], value[c] = s.value[c];
    }
  }
  if (cluster > 0 || rank > 0 || !a.out) return;
  const uint32_t last = before + a.count;
  for (int c = t; c < HIDDEN; c += THREADS) gain[c] = a.gain[c];
  gather_rows<INNER_CHUNKS, R>(a.begin, last, a.gated, last, a.M, x, [](int, const float(&)[3]) {});
  __syncthreads();
  normalise(d, x, roots, gain);
  for (int i = t; i < a.rows * HIDDEN; i += THREADS) {
    const int k = i % HIDDEN;
    a.out[i] = x[a.row[i / HIDDEN] * STREAM + k / WIDTH * PADDED + k % WIDTH];
  }
}

template <int R>
DEVICE void mlp_rows(const ResidentArguments& a, int cluster, int rank, uint32_t before) {
  SHARED(float, front);
  float* back = front + 2 * HALF_GROUPS * GROUP_FLOATS;
  uint64_t* words = reinterpret_cast<uint64_t*>(back + BACK_UNITS * UNIT);  // [R][WIDTH]
  float* x = reinterpret_cast<float*>(words + R * WIDTH);
  float* gain = x + R * most(STREAM, PADDED);
  float* sums = gain + HIDDEN;  // [R][FRONT_GATE]
  float* roots = sums + R * FRONT_GATE;
  Delivery* arrival = reinterpret_cast<Delivery*>(roots + 16);
  const int t = threadIdx.x, width = EVEN_INNER ? WIDTH : least(WIDTH, INTER - cluster * WIDTH);
  const int own = rank * HALF_GROUPS, spare = least(HALF_GROUPS, width / 8 - own);
  const int half = EVEN_INNER && WIDTH / 8 % CLUSTER == 0 ? HALF_GROUPS : spare > 0 ? spare : 0, columns = half * 8;
  auto fetch_front = [&](const float* weight, bool is_first) {
    fetch_weights(arrival, is_first, 2, half * HIDDEN * 32, [&](int u, float*& to, const float*& from) {
      to = front + u * half * GROUP_FLOATS;
      from = weight + static_cast<long>(u * INTER + cluster * WIDTH + own * 8) * HIDDEN;
    });
  };
  for (int i = t; i < R * WIDTH; i += THREADS) words[i] = word_of(0.0f, before);
  fetch_front(a.layers[0].gate_up, true);
  fetch_back(a.layers[0].down, arrival + 1, true, back, cluster, rank, width, INTER);
  cluster_barrier();
  const BackColumn b(rank);
  const int unit = t / 8, chunk = half ? least(unit / (2 * half), HIDDEN_CHUNKS - 1) : 0;
  const int steps = least(WIDTH, HIDDEN - chunk * WIDTH) / 4;
  const bool has_front = t < 2 * columns * HIDDEN_CHUNKS;
  const float* w = front + (half ? unit % (2 * half) : 0) * GROUP_FLOATS + chunk * UNIT + (t & 7) * 4;
  DecodeArguments d = {};
  d.M = a.M, d.eps = a.eps;
  const long row_words = static_cast<long>(a.M) * TRIPLES * 2;
  for (int i = 0; i < a.count; i++) {
    const bool more = i + 1 < a.count;
    const float* gains = a.layers[i].mlp_gain;
    const float *next_front = a.layers[more ? i + 1 : i].gate_up, *next_back = a.layers[more ? i + 1 : i].down;
    const uint32_t epoch = before + i + 1, parity = i & 1;
    for (int c = t; c < HIDDEN; c += THREADS) gain[c] = gains[c];
    gather_rows<KV_HEADS, R>(a.middle, epoch, a.attended, epoch, a.M, x, [&](int n, const float(&v)[3]) {
      if (cluster == 0 && rank == 0) publish(a.begin + 2 * n, v[0], v[1], v[2], epoch);
    });
    if (cluster == 0 && rank == 0 && t == 0 && !more) *a.epoch = epoch;
    __syncthreads();
    normalise(d, x, roots, gain);
    await_delivery(arrival, parity);
    if (has_front) chains<R>(x + chunk * PADDED, STREAM, a.M, w, steps, [&](int m, float y) { sums[m * FRONT_GATE + t] = y; });
    __syncthreads();
    if (more) fetch_front(next_front, false);
    for (int item = t; item < a.M * columns; item += THREADS) {
      const int m = item / columns, j = item % columns;
      const float* row = sums + m * FRONT_GATE + j;
      const float gate = tree_of<HIDDEN_CHUNKS>([&](int c) { return row[c * 2 * columns]; });
      const float up = tree_of<HIDDEN_CHUNKS>([&](int c) { return row[c * 2 * columns + columns]; });
      const uint64_t word = word_of(swiglu(gate, up), epoch);
      for (int r = 0; r < CLUSTER; r++) tell(words + m * WIDTH + own * 8 + j, r, word);
    }
    await_delivery(arrival + 1, parity);
    for (int j = t; j < a.M * width; j += THREADS)
      x[j / width * PADDED + j % width] = await_word(words + j / width * WIDTH + j % width, epoch);
    __syncthreads();
    back_rows<R>(x, back + b.place, width / 4, a.M, a.gated + cluster * row_words, rank, b, epoch);
    __syncthreads();
    if (more) fetch_back(next_back, arrival + 1, false, back, cluster, rank, width, INTER);
  }
}

template <int R>
DEVICE void resident_rows(const ResidentArguments& a) {
  const int cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  let_next_start();
  wait_previous();
  const uint32_t before = *a.epoch;
  if (cluster < KV_HEADS) attention_rows<R>(a, cluster, rank, before);
  else mlp_rows<R>(a, cluster - KV_HEADS, rank, before);
  leave_together();
}
RESIDENT_KERNEL(decode_resident_2, ResidentArguments, THREADS) { resident_rows<2>(a); }
RESIDENT_KERNEL(decode_resident_4, ResidentArguments, THREADS) { resident_rows<4>(a); }
#endif

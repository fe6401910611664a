// Attention over paged keys and values in three launches: scores, weights with P V, and the tree over chunks.
//
// A tile is up to QT pairs of (token, head of the group) that share a KV head: consecutive tokens of one sequence. A block
// takes one tile and one chunk of keys. Nothing outside a pair's own row, length and window enters its sums; chunks of
// which no pair of a tile sees a key are left out.

struct AttentionArguments {
  const float* qkv;  // (M, QKV), rotated
  const float* keys;
  const float* values;
  const int* table;
  const int* sequence;
  const int* position;
  const int* tile_row;    // first token of each tile
  const int* tile_count;  // tokens of each tile
  float* scores;          // [token - first_row][head][chunks * key_chunk]
  float* maxima;          // [token - first_row][head][chunk]
  float* sums;            // the same
  float* outputs;         // [token - first_row][head][chunk][DIM]
  float* out;             // (M, HEADS DIM)
  int pages, chunks, key_chunk, first_row;
  int window;  // keys a token sees, itself included; 0: all
  float scale;  // the float32 nearest to 1 / sqrt(DIM)
};

// The first key that a token with `length` keys sees.
DEVICE int first_seen(const AttentionArguments& a, int length) {
  return a.window && length > a.window ? length - a.window : 0;
}

struct Tile {
  int row, pairs, head, begin;
  const int* table;
  DEVICE Tile(const AttentionArguments& a)
      : row(a.tile_row[blockIdx.z]), pairs(a.tile_count[blockIdx.z] * GROUP), head(blockIdx.y),
        begin(blockIdx.x * a.key_chunk), table(a.table + static_cast<long>(a.sequence[row]) * a.pages) {}
  DEVICE int token(int pair) const { return row + pair / GROUP; }
  DEVICE int query_head(int pair) const { return head * GROUP + pair % GROUP; }
  DEVICE int length(const AttentionArguments& a, int pair) const { return a.position[token(pair)] + 1; }
  DEVICE int first(const AttentionArguments& a, int pair) const { return first_seen(a, length(a, pair)); }
  DEVICE long index(const AttentionArguments& a, int pair) const {
    return static_cast<long>(token(pair) - a.first_row) * HEADS + query_head(pair);
  }
};

// THREADS threads take 256 / THREADS keys each.
template <int QT, int THREADS>
DEVICE void score_tile(const AttentionArguments& a) {
  constexpr int KEYS = 256 / THREADS, WARPS = THREADS / 32;
  SHARED(float, q);  // [QT][DIM] scaled queries, then [QT][WARPS] maxima of warps, [QT] lengths and [QT] first keys
  float* top = q + QT * DIM;
  int* length = reinterpret_cast<int*>(top + QT * WARPS);
  int* first = length + QT;
  let_next_start();
  wait_previous();
  const Tile tile(a);
  const int t = threadIdx.x, longest = tile.length(a, tile.pairs - 1), earliest = tile.first(a, 0);
  if (tile.begin >= longest || tile.begin + a.key_chunk <= earliest) return;
  for (int i = t; i < QT * DIM; i += THREADS) {
    const int pair = i / DIM;
    q[i] = pair < tile.pairs ? mul(a.qkv[static_cast<long>(tile.token(pair)) * QKV + tile.query_head(pair) * DIM + i % DIM],
                                   a.scale)
                             : 0.0f;
  }
  if (t < QT) {
    length[t] = t < tile.pairs ? tile.length(a, t) : 0;
    first[t] = first_seen(a, length[t]);
  }
  const float* from[KEYS];
  bool here[KEYS];
  float sum[QT][KEYS];
#pragma unroll
  for (int n = 0; n < KEYS; n++) {
    const int i = t + n * THREADS;
    here[n] = i < a.key_chunk && tile.begin + i < longest && tile.begin + i >= earliest;
    from[n] = a.keys + (here[n] ? key_at(tile.table, tile.begin + i, tile.head) : 0);
#pragma unroll
    for (int p = 0; p < QT; p++) sum[p][n] = 0.0f;
  }
  float4 next[2][KEYS], k[2][KEYS];
  auto fetch = [&](int d) {
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int n = 0; n < KEYS; n++)
        if (here[n]) next[u][n] = load4(from[n] + (d / 4 + u) * KEY_STRIDE);
  };
  fetch(0);
  __syncthreads();
#pragma unroll 2
  for (int d = 0; d < DIM; d += 8) {
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int n = 0; n < KEYS; n++) k[u][n] = next[u][n];
    if (d + 8 < DIM) fetch(d + 8);
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int p = 0; p < QT; p++) {
        const float4 v = load4(q + p * DIM + d + u * 4);
#pragma unroll
        for (int n = 0; n < KEYS; n++) sum[p][n] = chain4(v, k[u][n], sum[p][n]);
      }
  }
#pragma unroll
  for (int p = 0; p < QT; p++) {
    float m = -INFINITY;
#pragma unroll
    for (int n = 0; n < KEYS; n++) {
      const int key = tile.begin + t + n * THREADS;
      if (!here[n] || key >= length[p] || key < first[p]) continue;
      a.scores[tile.index(a, p) * a.chunks * a.key_chunk + key] = sum[p][n];
      m = sum[p][n] > m ? sum[p][n] : m;
    }
    m = warp_maximum(m);
    if ((t & 31) == 0) top[p * WARPS + t / 32] = m;
  }
  __syncthreads();
  if (t < tile.pairs) {
    float m = top[t * WARPS];
    for (int w = 1; w < WARPS; w++) m = top[t * WARPS + w] > m ? top[t * WARPS + w] : m;
    a.maxima[tile.index(a, t) * a.chunks + blockIdx.x] = m;
  }
}
KERNEL(scores_4, AttentionArguments, 256) { score_tile<4, 256>(a); }
KERNEL(scores_16, AttentionArguments, 128) { score_tile<16, 128>(a); }

// P V continued over keys [begin, end) of a chunk for PAIRS pairs and DIMS dimensions: pair u takes those from start[u]
// up to count[u]. `v` holds values from key `begin` on, SLAB floats apart.
constexpr int SLAB = DIM < 64 ? DIM : 64, STAGED = 128;
template <int PAIRS, int DIMS, int QT>
DEVICE void weigh_pairs(const float* weight, const float* v, const int* start, const int* count, int begin, int end,
                        float (&o)[PAIRS][DIMS]) {
  int all = end, from = begin;
#pragma unroll
  for (int u = 0; u < PAIRS; u++)
    if (count[u] > 0) {
      all = least(all, count[u]);
      from = from > start[u] ? from : start[u];
    }
  auto one = [&](int i, bool guarded) {
    float x[DIMS], w[PAIRS];
#pragma unroll
    for (int j = 0; j < DIMS; j++) x[j] = v[(i - begin) * SLAB + j];
#pragma unroll
    for (int u = 0; u < PAIRS; u += 4) {
      const float4 four = load4(weight + i * QT + u);
      w[u] = four.x, w[u + 1] = four.y, w[u + 2] = four.z, w[u + 3] = four.w;
    }
#pragma unroll
    for (int u = 0; u < PAIRS; u++)
      if (!guarded || (i >= start[u] && i < count[u]))
#pragma unroll
        for (int j = 0; j < DIMS; j++) o[u][j] = fma(w[u], x[j], o[u][j]);
  };
  int i = begin;
  for (; i < least(from, end); i++) one(i, true);
#pragma unroll 4
  for (; i < all; i++) one(i, false);  // every pair with keys here sees these; what the others add up is not stored
  for (; i < end; i++) one(i, true);
}

template <int QT, int THREADS>
DEVICE void weigh_tile(const AttentionArguments& a) {
  constexpr int PAIRS = QT == 4 ? 4 : 8, DIMS = QT == 4 ? 2 : 4, LANES = SLAB / DIMS;
  SHARED(float, values);                                    // [STAGED][SLAB]
  float* weight = values + STAGED * SLAB;                   // [256][QT]
  long* base = reinterpret_cast<long*>(weight + 256 * QT);  // [256] where each key's value stands
  float* top = reinterpret_cast<float*>(base + 256);        // [QT] maximum of the pair's whole row
  int* count = reinterpret_cast<int*>(top + QT);            // [QT] the pair sees the keys of this chunk up to here
  int* start = count + QT;                                  // [QT] and from here on
  let_next_start();
  wait_previous();
  const Tile tile(a);
  const int t = threadIdx.x, longest = tile.length(a, tile.pairs - 1), before = tile.first(a, 0) - tile.begin;
  if (tile.begin >= longest || before >= a.key_chunk) return;
  const int most = least(a.key_chunk, longest - tile.begin), skipped = before > 0 ? before / STAGED * STAGED : 0;
  auto fetch = [&](int begin, int d0) {
    for (int i = t; i < least(STAGED, most - begin) * (SLAB / 4); i += THREADS)
      copy16(values + i * 4, a.values + base[begin + i / (SLAB / 4)] + d0 + i % (SLAB / 4) * 4, true);
    commit_copies();
  };
  for (int i = t; i < most; i += THREADS) base[i] = value_at(tile.table, tile.begin + i, tile.head);
  if (t < QT) {
    const int length = t < tile.pairs ? tile.length(a, t) : 0, first = first_seen(a, length);
    start[t] = first > tile.begin ? first - tile.begin : 0;
    count[t] = t < tile.pairs && start[t] < a.key_chunk ? least(a.key_chunk, length - tile.begin) : 0;
    float m = -INFINITY;
    if (count[t] > 0)
#pragma unroll 4
      for (int c = first / a.key_chunk; c <= (length - 1) / a.key_chunk; c++) {
        const float other = a.maxima[tile.index(a, t) * a.chunks + c];
        m = other > m ? other : m;
      }
    top[t] = m;
  }
  __syncthreads();
  fetch(skipped, 0);
  const float* scores = a.scores + tile.begin;
#pragma unroll 1
  for (int i = t; i < most; i += THREADS) {
    float score[QT];
#pragma unroll
    for (int p = 0; p < QT; p++)
      score[p] = i >= start[p] && i < count[p] ? scores[tile.index(a, p) * a.chunks * a.key_chunk + i] : 0.0f;
#pragma unroll
    for (int p = 0; p < QT; p++)
      weight[i * QT + p] = i >= start[p] && i < count[p] ? exp1(sub(score[p], top[p])) : 0.0f;
  }
  wait_copies<0>();
  __syncthreads();
  for (int pair = (THREADS - 1 - t) / 16; pair < QT; pair += THREADS / 16) {  // 16 lanes a pair, the last warps first
    float s = 0.0f;
    for (int i = t & 15; i < count[pair]; i += 16) s = add(s, weight[i * QT + pair]);
    s = fold_lanes(s);
    if ((t & 15) == 0 && count[pair] > 0) a.sums[tile.index(a, pair) * a.chunks + blockIdx.x] = s;
  }
  const int d = t % LANES * DIMS, first = t / LANES * PAIRS;
  for (int d0 = 0; d0 < DIM; d0 += SLAB) {
    float o[PAIRS][DIMS];
#pragma unroll
    for (int u = 0; u < PAIRS; u++)
#pragma unroll
      for (int j = 0; j < DIMS; j++) o[u][j] = 0.0f;
    for (int begin = skipped; begin < most; begin += STAGED) {
      if (d0 > 0 || begin > skipped) {
        __syncthreads();
        fetch(begin, d0);
        wait_copies<0>();
        __syncthreads();
      }
      if (first < QT)
        weigh_pairs<PAIRS, DIMS, QT>(weight + first, values + d, start + first, count + first, begin,
                                     least(most, begin + STAGED), o);
    }
    if (first >= QT) continue;
#pragma unroll
    for (int u = 0; u < PAIRS; u++)
      if (count[first + u] > 0)
#pragma unroll
        for (int j = 0; j < DIMS; j++)
          a.outputs[(tile.index(a, first + u) * a.chunks + blockIdx.x) * DIM + d0 + d + j] = o[u][j];
  }
}
KERNEL(weigh_4, AttentionArguments, 256) { weigh_tile<4, 256>(a); }
KERNEL(weigh_16, AttentionArguments, 128) { weigh_tile<16, 128>(a); }

// One block per token: T over the chunks of outputs and of sums, then IEEE division.
KERNEL(combine_chunks, AttentionArguments, 256) {
  let_next_start();
  wait_previous();
  const int m = a.first_row + blockIdx.x, skipped = first_seen(a, a.position[m] + 1) / a.key_chunk;
  const int chunks = a.position[m] / a.key_chunk + 1 - skipped;
  for (int i = threadIdx.x; i < HEADS * DIM; i += 256) {
    const long index = (static_cast<long>(blockIdx.x) * HEADS + i / DIM) * a.chunks + skipped;
    const float output = tree_over(chunks, [&](int c) { return a.outputs[(index + c) * DIM + i % DIM]; });
    const float sum = tree_over(chunks, [&](int c) { return a.sums[index + c]; });
    a.out[static_cast<long>(m) * HEADS * DIM + i] = divide(output, sum);
  }
}

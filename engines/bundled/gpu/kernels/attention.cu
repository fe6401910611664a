// Attention over paged keys and values in three launches: scores, weights with P V, and the tree over chunks.
//
// A tile is up to QT pairs of (token, head of the group) that share a KV head: consecutive tokens of one sequence. A block
// takes one tile and one chunk of keys. Nothing outside a pair's own row and own length enters its sums.

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
  float scale;  // the float32 nearest to 1 / sqrt(DIM)
};

struct Tile {
  int row, pairs, head, begin;
  const int* table;
  DEVICE Tile(const AttentionArguments& a)
      : row(a.tile_row[blockIdx.z]), pairs(a.tile_count[blockIdx.z] * GROUP), head(blockIdx.y),
        begin(blockIdx.x * a.key_chunk), table(a.table + static_cast<long>(a.sequence[row]) * a.pages) {}
  DEVICE int token(int pair) const { return row + pair / GROUP; }
  DEVICE int query_head(int pair) const { return head * GROUP + pair % GROUP; }
  DEVICE int length(const AttentionArguments& a, int pair) const { return a.position[token(pair)] + 1; }
  DEVICE long index(const AttentionArguments& a, int pair) const {
    return static_cast<long>(token(pair) - a.first_row) * HEADS + query_head(pair);
  }
};

template <int QT>
DEVICE void score_tile(const AttentionArguments& a) {
  SHARED(float, q);  // [QT][DIM] scaled queries, then [QT][8] maxima of warps
  float* top = q + QT * DIM;
  let_next_start();
  wait_previous();
  const Tile tile(a);
  const int t = threadIdx.x, key = tile.begin + t, longest = tile.length(a, tile.pairs - 1);
  if (tile.begin >= longest) return;
  for (int i = t; i < QT * DIM; i += 256) {
    const int pair = i / DIM;
    q[i] = pair < tile.pairs ? mul(a.qkv[static_cast<long>(tile.token(pair)) * QKV + tile.query_head(pair) * DIM + i % DIM],
                                   a.scale)
                             : 0.0f;
  }
  __syncthreads();
  const bool here = t < a.key_chunk && key < longest;
  float sum[QT];
#pragma unroll
  for (int p = 0; p < QT; p++) sum[p] = 0.0f;
  if (here) {
    const float* from = a.keys + key_at(tile.table, key, tile.head);
#pragma unroll 1
    for (int d = 0; d < DIM; d += 16) {
      float4 k[4];
#pragma unroll
      for (int u = 0; u < 4; u++) k[u] = load4(from + (d / 4 + u) * KEY_STRIDE);
#pragma unroll
      for (int p = 0; p < QT; p++)
#pragma unroll
        for (int u = 0; u < 4; u++) sum[p] = chain4(load4(q + p * DIM + d + u * 4), k[u], sum[p]);
    }
  }
#pragma unroll
  for (int p = 0; p < QT; p++) {
    const bool seen = here && p < tile.pairs && key < tile.length(a, p);
    if (seen) a.scores[tile.index(a, p) * a.chunks * a.key_chunk + key] = sum[p];
    const float m = warp_maximum(seen ? sum[p] : -INFINITY);
    if ((t & 31) == 0) top[p * 8 + t / 32] = m;
  }
  __syncthreads();
  if (t < tile.pairs) {
    float m = top[t * 8];
    for (int w = 1; w < 8; w++) m = top[t * 8 + w] > m ? top[t * 8 + w] : m;
    a.maxima[tile.index(a, t) * a.chunks + blockIdx.x] = m;
  }
}
KERNEL(scores_4, AttentionArguments, 256) { score_tile<4>(a); }
KERNEL(scores_16, AttentionArguments, 256) { score_tile<16>(a); }

template <int QT>
DEVICE void weigh_tile(const AttentionArguments& a) {
  SHARED(float, weight);                                           // [256][QT]
  long* base = reinterpret_cast<long*>(weight + 256 * QT);         // [256] where each key's value stands
  float* top = reinterpret_cast<float*>(base + 256);               // [QT] maximum of the pair's whole row
  int* count = reinterpret_cast<int*>(top + QT);                   // [QT] keys of this chunk that the pair sees
  let_next_start();
  wait_previous();
  const Tile tile(a);
  const int t = threadIdx.x, key = tile.begin + t, longest = tile.length(a, tile.pairs - 1);
  if (tile.begin >= longest) return;
  if (t < QT) {
    count[t] = t < tile.pairs ? least(a.key_chunk, tile.length(a, t) - tile.begin) : 0;
    float m = -INFINITY;
    if (count[t] > 0)
      for (int c = 0; c * a.key_chunk < tile.length(a, t); c++) {
        const float other = a.maxima[tile.index(a, t) * a.chunks + c];
        m = other > m ? other : m;
      }
    top[t] = m;
  }
  base[t] = t < a.key_chunk && key < longest ? value_at(tile.table, key, tile.head) : 0;
  __syncthreads();
#pragma unroll
  for (int p = 0; p < QT; p++)
    weight[t * QT + p] =
        t < count[p] ? exp1(sub(a.scores[tile.index(a, p) * a.chunks * a.key_chunk + key], top[p])) : 0.0f;
  __syncthreads();
  const int half = t / 16;
  if (half < QT) {  // 16 lanes a pair, whole warps
    float s = 0.0f;
    for (int i = t & 15; i < count[half]; i += 16) s = add(s, weight[i * QT + half]);
    s = fold_lanes(s);
    if ((t & 15) == 0 && count[half] > 0) a.sums[tile.index(a, half) * a.chunks + blockIdx.x] = s;
  }
  for (int item = t; item < DIM * (QT / 4); item += 256) {
    const int d = item % DIM, p0 = item / DIM * 4;
    int n[4];
#pragma unroll
    for (int u = 0; u < 4; u++) n[u] = count[p0 + u];
    float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int all = 256;
#pragma unroll
    for (int u = 0; u < 4; u++) all = n[u] > 0 ? least(all, n[u]) : all;
    const int most = least(a.key_chunk, longest - tile.begin);
    all = least(all, most);
    const float* v = a.values + d;
    int i = 0;
#pragma unroll 8
    for (; i < all; i++) {  // every pair with keys here sees these; what the others add up is not stored
      const float x = v[base[i]];
      const float4 w = load4(weight + i * QT + p0);
      o[0] = fma(w.x, x, o[0]);
      o[1] = fma(w.y, x, o[1]);
      o[2] = fma(w.z, x, o[2]);
      o[3] = fma(w.w, x, o[3]);
    }
    for (; i < most; i++) {
      const float x = v[base[i]];
#pragma unroll
      for (int u = 0; u < 4; u++) o[u] = i < n[u] ? fma(weight[i * QT + p0 + u], x, o[u]) : o[u];
    }
#pragma unroll
    for (int u = 0; u < 4; u++)
      if (n[u] > 0) a.outputs[(tile.index(a, p0 + u) * a.chunks + blockIdx.x) * DIM + d] = o[u];
  }
}
KERNEL(weigh_4, AttentionArguments, 256) { weigh_tile<4>(a); }
KERNEL(weigh_16, AttentionArguments, 256) { weigh_tile<16>(a); }

// One block per token: T over the chunks of outputs and of sums, then IEEE division.
KERNEL(combine_chunks, AttentionArguments, 256) {
  let_next_start();
  wait_previous();
  const int m = a.first_row + blockIdx.x, chunks = a.position[m] / a.key_chunk + 1;
  for (int i = threadIdx.x; i < HEADS * DIM; i += 256) {
    const long index = (static_cast<long>(blockIdx.x) * HEADS + i / DIM) * a.chunks;
    Tree output, sum;
    for (int c = 0; c < chunks; c++) {
      output.push(a.outputs[(index + c) * DIM + i % DIM]);
      sum.push(a.sums[index + c]);
    }
    a.out[static_cast<long>(m) * HEADS * DIM + i] = divide(output.close(), sum.close());
  }
}

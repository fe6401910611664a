// Linear layers for few rows and for many. A thread owns whole chains; who owns which never moves a bit.
//
// Weights are packed [N / 8][K / 4][8][4]: eight columns by four steps of K are 128 bytes in a row.

struct LinearArguments {
  const float* x;       // (M, K)
  const float* weight;  // packed, columns padded to a multiple of 128
  const float* bias;    // (N) or null
  float* out;           // (M, N)
  float* partial;       // many rows, split K: [tile][part][rows x columns of a tile]
  int M, N, K, width;   // width of a chunk of K, a multiple of 16
  int sum;              // 1: added to what out holds, with one rounding
  int share;            // few rows: groups of eight columns in a block; many rows: chunks in a block, a power of two
};

DEVICE void put(const LinearArguments& a, int m, int n, float y) {
  const long at = static_cast<long>(m) * a.N + n;
  if (a.bias) y = add(y, a.bias[n]);
  a.out[at] = a.sum ? add(a.out[at], y) : y;
}

// ---- few rows: thread = (column, chunk), R rows ------------------------------------------------------------------------
DEVICE float chain4(float4 x, float4 w, float sum) {
  return fma(x.w, w.w, fma(x.z, w.z, fma(x.y, w.y, fma(x.x, w.x, sum))));
}

template <int R>
DEVICE void few_rows(const LinearArguments& a) {
  SHARED(float, xs);  // [R][chunk][width + 4], then chunk sums [chunk][R][columns]
  const int t = threadIdx.x, threads = blockDim.x, C = ceil_div(a.K, a.width), padded = a.width + 4, m0 = blockIdx.y * R;
  const int columns = 8 * a.share, chunk = t / columns, g = blockIdx.x * a.share + (t % columns) / 8;
  const int begin = chunk * a.width, steps = least(a.width, a.K - begin) / 4;
  float* sums = xs + R * C * padded;
  const float* w = a.weight + (static_cast<long>(g) * (a.K / 4) + begin / 4) * 32 + (t & 7) * 4;
  constexpr int AHEAD = R <= 2 ? 12 : 8;  // weights in flight, twice
  float4 next[AHEAD], now[AHEAD];
#pragma unroll
  for (int u = 0; u < AHEAD; u++)
    if (u < steps) next[u] = weight4(w + u * 32);
  let_next_start();
  wait_previous();
  for (int i = t; i < R * (a.K / 4); i += threads) {
    const int r = i / (a.K / 4), k = i % (a.K / 4) * 4, m = least(m0 + r, a.M - 1);
    store4(xs + (r * C + k / a.width) * padded + k % a.width, load4(a.x + static_cast<long>(m) * a.K + k));
  }
  __syncthreads();
  float sum[R];
#pragma unroll
  for (int r = 0; r < R; r++) sum[r] = 0.0f;
  for (int k = 0; k < steps; k += AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      now[u] = next[u];
      if (k + AHEAD + u < steps) next[u] = weight4(w + (k + AHEAD + u) * 32);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
      if (k + u < steps) {
#pragma unroll
        for (int r = 0; r < R; r++) sum[r] = chain4(load4(xs + (r * C + chunk) * padded + (k + u) * 4), now[u], sum[r]);
      }
  }
#pragma unroll
  for (int r = 0; r < R; r++) sums[(chunk * R + r) * columns + t % columns] = sum[r];
  __syncthreads();
  for (int i = t; i < R * columns; i += threads) {
    const int m = m0 + i / columns, n = blockIdx.x * columns + i % columns;
    const float y = tree_in_place(sums + i, R * columns, C);
    if (m < a.M && n < a.N) put(a, m, n, y);
  }
}
KERNEL(few_rows_1, LinearArguments, 512) { few_rows<1>(a); }
KERNEL(few_rows_2, LinearArguments, 512) { few_rows<2>(a); }
KERNEL(few_rows_4, LinearArguments, 512) { few_rows<4>(a); }
KERNEL(few_rows_8, LinearArguments, 512) { few_rows<8>(a); }

// ---- many rows: register tiles over a ring of shared-memory stages -----------------------------------------------------
// A block has WM x WN warps, a warp 4 x 8 threads, a thread TM x TN outputs: rows 4 apart, columns 8 apart. The blocks of
// a cluster (grid.z) take aligned subtrees of `share` chunks each and finish T together.
template <int WM, int WN, int TM, int TN, int BK, int STAGES>
DEVICE void many_rows(const LinearArguments& a) {
  constexpr int THREADS = WM * WN * 32, BM = WM * 4 * TM, BN = WN * 8 * TN, AS = BK + 4, STEPS = BK / 4;
  constexpr int A_SIZE = BM * AS, B_SIZE = BK * BN;
  SHARED(float, ring);
  float *as = ring, *bs = ring + STAGES * A_SIZE;
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const int row = warp / WN * 4 * TM + (lane >> 3), column = warp % WN * 8 * TN + (lane & 7);
  const int m0 = blockIdx.x * BM, n0 = blockIdx.y * BN, C = ceil_div(a.K, a.width), spare = a.M - m0 - t / STEPS;
  const int first = blockIdx.z * a.share * a.width, last = least(first + a.share * a.width, a.K);
  float acc[TM][TN], level[5][TM][TN];
  int depth = 0, chunk = 0;
  auto clear = [&] {
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
      for (int j = 0; j < TN; j++) acc[i][j] = 0.0f;
  };
  auto merge = [&] {
    depth--;
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
      for (int j = 0; j < TN; j++) acc[i][j] = add(level[depth][i][j], acc[i][j]);
  };
  const float* from_x = a.x + static_cast<long>(m0 + t / STEPS) * a.K + first + t % STEPS * 4;
  const float* from_w =
      a.weight + (static_cast<long>(n0 / 8 + t / (2 * BK)) * (a.K / 4) + first / 4) * 32 + t % (2 * BK) * 4;
  float *to_x = as + t / STEPS * AS + t % STEPS * 4, *to_w = bs + (t / 8 % STEPS * BN + t / (2 * BK) * 8 + t % 8) * 4;
  auto fetch = [&](int k, int slot) {
    if (k < last) {
#pragma unroll
      for (int i = 0; i < BM * STEPS / THREADS; i++) {
        const bool real = i * (THREADS / STEPS) < spare;
        const float* from = real ? from_x + static_cast<long>(i) * (THREADS / STEPS) * a.K : a.x;
        copy16(to_x + slot * A_SIZE + i * (THREADS / STEPS) * AS, from, real);
      }
#pragma unroll
      for (int i = 0; i < BN * STEPS / THREADS; i++)
        copy16(to_w + slot * B_SIZE + i * (THREADS / (2 * BK)) * 32,
               from_w + static_cast<long>(i) * (THREADS / (2 * BK)) * a.K * 8, true);
      from_x += BK;
      from_w += BK * 8;
    }
    commit_copies();
  };
  clear();
  wait_previous();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(first + s * BK, s);
  int slot = 0, left = a.width;
  for (int k = first; k < last; k += BK) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    fetch(k + (STAGES - 1) * BK, (slot + STAGES - 1) % STAGES);
    const float *x = as + slot * A_SIZE + row * AS, *w = bs + slot * B_SIZE + column * 4;
#pragma unroll(TN > 4 ? 2 : 4)
    for (int step = 0; step < STEPS; step++) {
      float4 b[TN];
#pragma unroll
      for (int j = 0; j < TN; j++) b[j] = load4(w + (step * BN + 8 * j) * 4);
#pragma unroll
      for (int i = 0; i < TM; i++) {
        const float4 v = load4(x + 4 * i * AS + step * 4);
#pragma unroll
        for (int j = 0; j < TN; j++) acc[i][j] = fma(v.x, b[j].x, acc[i][j]);
#pragma unroll
        for (int j = 0; j < TN; j++) acc[i][j] = fma(v.y, b[j].y, acc[i][j]);
#pragma unroll
        for (int j = 0; j < TN; j++) acc[i][j] = fma(v.z, b[j].z, acc[i][j]);
#pragma unroll
        for (int j = 0; j < TN; j++) acc[i][j] = fma(v.w, b[j].w, acc[i][j]);
      }
    }
    slot = (slot + 1) % STAGES;
    left -= BK;
    if (left == 0 && k + BK < last) {  // a chunk is complete and another follows
      for (int c = chunk; c & 1; c >>= 1) merge();
#pragma unroll
      for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++) level[depth][i][j] = acc[i][j];
      depth++;
      chunk++;
      left = a.width;
      clear();
    }
  }
  let_next_start();
  while (depth > 0) merge();
  const int parts = ceil_div(C, a.share);
  if (parts == 1) {
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
      for (int j = 0; j < TN; j++) {
        const int m = m0 + row + 4 * i, n = n0 + column + 8 * j;
        if (m < a.M && n < a.N) put(a, m, n, acc[i][j]);
      }
    return;
  }
#if LINKED
  float* mine = a.partial + static_cast<long>(blockIdx.y * gridDim.x + blockIdx.x) * parts * BM * BN;
#pragma unroll
  for (int i = 0; i < TM; i++)
#pragma unroll
    for (int j = 0; j < TN; j++) mine[(blockIdx.z * BM + row + 4 * i) * BN + column + 8 * j] = acc[i][j];
  cluster_barrier();
  for (int i = blockIdx.z * THREADS + t; i < BM * BN; i += parts * THREADS) {
    const int m = m0 + i / BN, n = n0 + i % BN;
    if (m >= a.M || n >= a.N) continue;
    float part[8];
#pragma unroll
    for (int p = 0; p < 8; p++) part[p] = p < parts ? fresh(mine + p * BM * BN + i) : 0.0f;
    put(a, m, n, tree_in_place(part, 1, parts));
  }
#endif
}
KERNEL(many_rows_any, LinearArguments, 128) { many_rows<2, 2, 8, 4, 16, 4>(a); }
KERNEL(many_rows_32, LinearArguments, 64) { many_rows<1, 2, 8, 4, 32, 3>(a); }
KERNEL(many_rows_64, LinearArguments, 128) { many_rows<2, 2, 8, 4, 32, 3>(a); }
KERNEL(many_rows_64x128, LinearArguments, 128) { many_rows<2, 2, 8, 8, 32, 3>(a); }
KERNEL(many_rows_128, LinearArguments, 256) { many_rows<4, 2, 8, 8, 16, 4>(a); }

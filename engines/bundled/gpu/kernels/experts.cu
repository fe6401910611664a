// Mixtures of experts: routing, products of pairs (token, expert), and the mix. docs/numerics.md, Mixture of experts.
//
// A pair is one of the k experts of one token: pair = token * k + slot, slots in ascending expert id. Pairs of one expert
// may share a block; who shares one never moves a bit, because a pair's chains name its own row alone.

struct RouteArguments {
  const float* logits;  // (M, experts)
  int* expert;          // (M, k) ids, ascending
  float* weight;        // (M, k)
  int experts, k;
};
KERNEL(route, RouteArguments, 128) {
  SHARED(float, p);  // [experts] exponentials, then probabilities; their maximum and sum; [experts] who is chosen
  float* top = p + a.experts;
  int* chosen = reinterpret_cast<int*>(top + 2);
  let_next_start();
  wait_previous();
  const int t = threadIdx.x, m = blockIdx.x, E = a.experts;
  const float* x = a.logits + static_cast<long>(m) * E;
  if (t < 32) {
    float largest = -INFINITY;
    for (int i = t; i < E; i += 32) largest = x[i] > largest ? x[i] : largest;
    largest = warp_maximum(largest);
    if (t == 0) top[0] = largest;
  }
  __syncthreads();
  for (int i = t; i < E; i += 128) p[i] = exp1(sub(x[i], top[0]));
  __syncthreads();
  if (t < 32) {
    float s = 0.0f;
    for (int i = t & 15; i < E; i += 16) s = add(s, p[i]);
    s = fold_lanes(s);
    if (t == 0) top[1] = s;
  }
  __syncthreads();
  for (int i = t; i < E; i += 128) p[i] = divide(p[i], top[1]);
  __syncthreads();
  for (int i = t; i < E; i += 128) {
    int better = 0;
    for (int j = 0; j < E; j++) better += p[j] > p[i] || (p[j] == p[i] && j < i);
    chosen[i] = better < a.k;
  }
  __syncthreads();
  if (t > 0) return;
  int slot = 0;
  float sum = 0.0f;
  for (int i = 0; i < E && slot < a.k; i++)
    if (chosen[i]) {
      a.expert[m * a.k + slot++] = i;
      sum = add(sum, p[i]);
    }
  for (int s = 0; s < a.k; s++) a.weight[m * a.k + s] = divide(p[a.expert[m * a.k + s]], sum);
}

// Pairs in tiles of `rows` pairs of the same expert, experts in ascending order; one block.
struct GroupArguments {
  const int* expert;  // [pairs]
  int* tile_expert;   // [tiles], -1: no pairs
  int* tile_pair;     // [tiles][rows], -1: none
  int pairs, experts, rows, tiles;
};
KERNEL(group_pairs, GroupArguments, 256) {
  SHARED(int, first);  // [experts + 1] first tile of each expert
  let_next_start();
  wait_previous();
  const int t = threadIdx.x;
  for (int i = t; i < a.tiles * a.rows; i += 256) a.tile_pair[i] = -1;
  for (int i = t; i < a.tiles; i += 256) a.tile_expert[i] = -1;
  for (int e = t; e < a.experts; e += 256) {
    int count = 0;
    for (int i = 0; i < a.pairs; i++) count += a.expert[i] == e;
    first[e + 1] = ceil_div(count, a.rows);
  }
  __syncthreads();
  if (t == 0) {
    first[0] = 0;
    for (int e = 0; e < a.experts; e++) first[e + 1] += first[e];
  }
  __syncthreads();
  for (int e = t; e < a.experts; e += 256) {
    for (int tile = first[e]; tile < first[e + 1]; tile++) a.tile_expert[tile] = e;
    int at = first[e] * a.rows;
    for (int i = 0; i < a.pairs; i++)
      if (a.expert[i] == e) a.tile_pair[at++] = i;
  }
}

struct ExpertArguments {
  const float* x;          // rows of K floats; pair p takes row p / fan
  const float* weight;     // packed matrices as in linear.cu, `stride` floats from one expert's to the next
  float* out;              // (pairs, N)
  const int* expert;       // of each pair; read when a tile is one pair
  const int* tile_expert;  // of each tile, -1: nothing to do
  const int* tile_pair;    // [tiles][R]
  int N, K, width, share, fan, stride;
};

// As `few_rows` in linear.cu: thread = (column, chunk), a tile of R pairs of one expert.
template <int R>
DEVICE void expert_rows(const ExpertArguments& a) {
  SHARED(float, xs);  // [R][chunk][width + 4], then chunk sums [chunk][R][columns]
  let_next_start();
  wait_previous();
  const int tile = blockIdx.y, expert = R == 1 ? a.expert[tile] : a.tile_expert[tile];
  if (expert < 0) return;
  auto pair_of = [&](int r) { return R == 1 ? tile : a.tile_pair[tile * R + r]; };
  const int t = threadIdx.x, threads = blockDim.x, C = ceil_div(a.K, a.width), padded = a.width + 4;
  const int columns = 8 * a.share, chunk = t / columns, g = blockIdx.x * a.share + (t % columns) / 8;
  const int begin = chunk * a.width, steps = least(a.width, a.K - begin) / 4;
  float* sums = xs + R * C * padded;
  for (int i = t; i < R * (a.K / 4); i += threads) {
    const int r = i / (a.K / 4), k = i % (a.K / 4) * 4, pair = pair_of(r);
    if (pair >= 0)
      store4(xs + (r * C + k / a.width) * padded + k % a.width, load4(a.x + static_cast<long>(pair / a.fan) * a.K + k));
  }
  __syncthreads();
  const float* w = a.weight + static_cast<long>(expert) * a.stride +
                   (static_cast<long>(g) * (a.K / 4) + begin / 4) * 32 + (t & 7) * 4;
  float sum[R];
#pragma unroll
  for (int r = 0; r < R; r++) sum[r] = 0.0f;
#pragma unroll 8
  for (int k = 0; k < steps; k++) {
    const float4 v = weight4(w + k * 32);
#pragma unroll
    for (int r = 0; r < R; r++) sum[r] = chain4(load4(xs + (r * C + chunk) * padded + k * 4), v, sum[r]);
  }
#pragma unroll
  for (int r = 0; r < R; r++) sums[(chunk * R + r) * columns + t % columns] = sum[r];
  __syncthreads();
  for (int i = t; i < R * columns; i += threads) {
    const int pair = pair_of(i / columns), n = blockIdx.x * columns + i % columns;
    const float y = tree_in_place(sums + i, R * columns, C);
    if (pair >= 0 && n < a.N) a.out[static_cast<long>(pair) * a.N + n] = y;
  }
}
KERNEL(expert_rows_1, ExpertArguments, 512) { expert_rows<1>(a); }
KERNEL(expert_rows_8, ExpertArguments, 512) { expert_rows<8>(a); }

struct GateArguments {
  const float* gate_up;  // (pairs, 2 inner), gate first
  float* out;            // (pairs, inner)
  int pairs, inner;
};
KERNEL(swiglu_pairs, GateArguments, 256) {
  let_next_start();
  wait_previous();
  const long size = static_cast<long>(a.pairs) * a.inner;
  for (long i = static_cast<long>(blockIdx.x) * 256 + threadIdx.x; i < size; i += static_cast<long>(gridDim.x) * 256) {
    const float* gate = a.gate_up + i / a.inner * 2 * a.inner + i % a.inner;
    a.out[i] = swiglu(gate[0], gate[a.inner]);
  }
}

struct MixArguments {
  const float* said;    // (M, k, HIDDEN)
  const float* weight;  // (M, k)
  float* hidden;        // (M, HIDDEN), to which the mix is added with one rounding
  int k;
};
KERNEL(mix_experts, MixArguments, 128) {
  let_next_start();
  wait_previous();
  const long m = blockIdx.x;
  for (int n = threadIdx.x; n < HIDDEN; n += 128) {
    float sum = 0.0f;
    for (int s = 0; s < a.k; s++) sum = fma(a.weight[m * a.k + s], a.said[(m * a.k + s) * HIDDEN + n], sum);
    a.hidden[m * HIDDEN + n] = add(a.hidden[m * HIDDEN + n], sum);
  }
}

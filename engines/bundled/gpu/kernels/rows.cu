// Kernels that work row by row: packing, embedding, RMSNorm, rope with the store into pages, the gated activation.

struct PackArguments {
  const float* weight;  // (N, K)
  float* out;           // [N / 8][K / 4][8][4], rows past N are zero
  int N, K, padded;
};
KERNEL(pack, PackArguments, 256) {
  wait_previous();
  const long size = static_cast<long>(a.padded) * a.K;
  for (long i = static_cast<long>(blockIdx.x) * 256 + threadIdx.x; i < size; i += static_cast<long>(gridDim.x) * 256) {
    const int k = i & 3, c = i >> 2 & 7;
    const long rest = i >> 5, n = rest / (a.K / 4) * 8 + c;
    a.out[i] = n < a.N ? a.weight[n * a.K + rest % (a.K / 4) * 4 + k] : 0.0f;
  }
}

struct EmbedArguments {
  const float* table;  // (vocabulary, HIDDEN)
  const int* token;
  float* out;  // (M, HIDDEN)
};
KERNEL(embed, EmbedArguments, 128) {
  wait_previous();
  for (int k = threadIdx.x * 4; k < HIDDEN; k += 512)
    store4(a.out + static_cast<long>(blockIdx.x) * HIDDEN + k,
           load4(a.table + static_cast<long>(a.token[blockIdx.x]) * HIDDEN + k));
}

// Root of the mean square of x (in shared memory, n floats), in *out; the first warp works.
DEVICE void root_mean_square(const float* x, int n, float eps, float* out) {
  const int t = threadIdx.x;
  if (t >= 32) return;
  float q = 0.0f;
#pragma unroll 12
  for (int k = t & 15; k < n; k += 16) q = fma(x[k], x[k], q);
  q = fold_lanes(q);
  if (t == 0) *out = root(add(divide(q, static_cast<float>(n)), eps));
}

struct NormArguments {
  const float* x;  // rows of HIDDEN floats
  const float* gain;
  const int* row;  // which row of x each block takes
  float* out;      // (M, HIDDEN)
  int gathered;    // 0: row is not read, block m takes row m
  float eps;
};
KERNEL(rms_norm, NormArguments, 128) {
  SHARED(float, x);
  const int t = threadIdx.x, m = blockIdx.x;
  let_next_start();
  wait_previous();
  const float* from = a.x + static_cast<long>(a.gathered ? a.row[m] : m) * HIDDEN;
  for (int k = t * 4; k < HIDDEN; k += 512) store4(x + k, load4(from + k));
  __syncthreads();
  root_mean_square(x, HIDDEN, a.eps, x + HIDDEN);
  __syncthreads();
  const float r = x[HIDDEN];
  for (int k = t; k < HIDDEN; k += 128) a.out[static_cast<long>(m) * HIDDEN + k] = mul(divide(x[k], r), a.gain[k]);
}

struct HeadNormArguments {
  float* qkv;           // (M, QKV), q and k normalised in place
  const float* q_gain;  // DIM floats
  const float* k_gain;
  float eps;
};
KERNEL(norm_heads, HeadNormArguments, 128) {
  SHARED(float, x);
  const int t = threadIdx.x, h = blockIdx.y;
  let_next_start();
  wait_previous();
  float* head = a.qkv + static_cast<long>(blockIdx.x) * QKV + h * DIM;
  const float* gain = h < HEADS ? a.q_gain : a.k_gain;
  for (int k = t; k < DIM; k += 128) x[k] = head[k];
  __syncthreads();
  root_mean_square(x, DIM, a.eps, x + DIM);
  __syncthreads();
  const float r = x[DIM];
  for (int k = t; k < DIM; k += 128) head[k] = mul(divide(x[k], r), gain[k]);
}

struct RopeArguments {
  float* qkv;            // (M, QKV), q and k rotated in place
  const float* cos_sin;  // (positions, DIM)
  float* keys;
  float* values;
  const int* table;
  const int* sequence;
  const int* position;
  int pages;
};
KERNEL(rope_store, RopeArguments, 128) {
  let_next_start();
  wait_previous();
  const int m = blockIdx.x, position = a.position[m];
  const int* table = a.table + static_cast<long>(a.sequence[m]) * a.pages;
  const float* angle = a.cos_sin + static_cast<long>(position) * DIM;
  float* row = a.qkv + static_cast<long>(m) * QKV;
  for (int i = threadIdx.x; i < QKV / 2; i += 128) {
    const int h = i / (DIM / 2), j = i % (DIM / 2), j2 = j + DIM / 2;
    float x = row[h * DIM + j], y = row[h * DIM + j2];
    if (h < HEADS + KV_HEADS) {
      const float c = angle[j], s = angle[j2], rotated = sub(mul(x, c), mul(y, s));
      y = add(mul(y, c), mul(x, s));
      x = rotated;
      row[h * DIM + j] = x;
      row[h * DIM + j2] = y;
    }
    if (h < HEADS) continue;
    if (h < HEADS + KV_HEADS) {
      float* key = a.keys + key_at(table, position, h - HEADS);
      key[j / 4 * KEY_STRIDE + j % 4] = x;
      key[j2 / 4 * KEY_STRIDE + j2 % 4] = y;
    } else {
      float* value = a.values + value_at(table, position, h - HEADS - KV_HEADS);
      value[j] = x;
      value[j2] = y;
    }
  }
}

struct SwigluArguments {
  const float* gate_up;  // (M, 2 INTER), gate first
  float* out;            // (M, INTER)
  int M;
};
KERNEL(swiglu_rows, SwigluArguments, 256) {
  let_next_start();
  wait_previous();
  const long size = static_cast<long>(a.M) * INTER;
  for (long i = static_cast<long>(blockIdx.x) * 256 + threadIdx.x; i < size; i += static_cast<long>(gridDim.x) * 256) {
    const float* gate = a.gate_up + i / INTER * 2 * INTER + i % INTER;
    a.out[i] = swiglu(gate[0], gate[INTER]);
  }
}

struct ExpArguments {
  const float* x;
  float* out;
  int n;
};
KERNEL(exponential, ExpArguments, 256) {
  wait_previous();
  for (int i = blockIdx.x * 256 + threadIdx.x; i < a.n; i += gridDim.x * 256) a.out[i] = exp1(a.x[i]);
}

// Log-probabilities, one block a row: sums of exponentials in chunks of 768 ids, a half-warp each, added by T.
struct SoftmaxArguments {
  const float* logits;  // (M, n)
  float* out;           // (M, n)
  int n;
};
constexpr int VOCABULARY_CHUNK = 768;
KERNEL(log_softmax, SoftmaxArguments, 512) {
  SHARED(float, sums);  // [chunks], then maxima of 16 warps, the maximum, the logarithm
  const int t = threadIdx.x, lane = t & 31, warp = t / 32, chunks = ceil_div(a.n, VOCABULARY_CHUNK);
  float* top = sums + chunks;
  let_next_start();
  wait_previous();
  const float* x = a.logits + static_cast<long>(blockIdx.x) * a.n;
  float* out = a.out + static_cast<long>(blockIdx.x) * a.n;
  float m = -INFINITY;
#pragma unroll 4
  for (int i = t; i < a.n; i += 512) m = x[i] > m ? x[i] : m;
  m = warp_maximum(m);
  if (lane == 0) top[warp] = m;
  __syncthreads();
  if (t == 0) {
    for (int w = 0; w < 16; w++) m = top[w] > m ? top[w] : m;
    top[16] = m;
  }
  __syncthreads();
  m = top[16];
  for (int first = warp * 2; first < chunks; first += 32) {
    const int c = first + (lane >> 4), end = least((c + 1) * VOCABULARY_CHUNK, a.n);
    float s = 0.0f;
    if (c < chunks)
#pragma unroll 4
      for (int i = c * VOCABULARY_CHUNK + (lane & 15); i < end; i += 16) s = add(s, exp1(sub(x[i], m)));
    s = fold_lanes(s);
    if ((lane & 15) == 0 && c < chunks) sums[c] = s;
  }
  __syncthreads();
  if (t == 0) top[17] = log1(tree_in_place(sums, 1, chunks));
  __syncthreads();
  const float logarithm = top[17];
  for (int i = t; i < a.n; i += 512) out[i] = sub(sub(x[i], m), logarithm);
}

// What several ranks of one model need beside the rest: some columns of a matrix, and T from the sums of its sub-trees.

struct ColumnsArguments {
  const float* x;  // (M, K); K 0: every row is the first one
  float* out;      // (M, count)
  int M, K, begin, count;
};
KERNEL(take_columns, ColumnsArguments, 256) {
  wait_previous();
  const long size = static_cast<long>(a.M) * a.count;
  for (long i = static_cast<long>(blockIdx.x) * 256 + threadIdx.x; i < size; i += static_cast<long>(gridDim.x) * 256)
    a.out[i] = a.x[i / a.count * a.K + a.begin + i % a.count];
}

struct CompleteArguments {
  const float* sums;   // sums of sub-trees, `size` floats each
  const int* program;  // in the order of T: which sub-tree comes next, or -1: the last two are added
  float* hidden;       // (size): T is added with one rounding
  int size, steps;
};
KERNEL(complete_tree, CompleteArguments, 256) {
  wait_previous();
  for (long i = static_cast<long>(blockIdx.x) * 256 + threadIdx.x; i < a.size; i += static_cast<long>(gridDim.x) * 256) {
    float stack[32];  // T is as deep as the logarithm of its chunks
    int top = 0;
    for (int s = 0; s < a.steps; s++) {
      const int which = a.program[s];
      if (which >= 0) {
        stack[top++] = a.sums[static_cast<long>(which) * a.size + i];
      } else {
        top--;
        stack[top - 1] = add(stack[top - 1], stack[top]);
      }
    }
    a.hidden[i] = add(a.hidden[i], stack[0]);
  }
}

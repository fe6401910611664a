"""One model over several processes: who holds what, how their partial sums meet, and how a lost rank is noticed.

layout      which heads, chunks, ids and experts each rank holds; the tree T over chunks that ranks share
group       collectives over torch.distributed (gloo on CPUs, NCCL on GPUs), each with a deadline
pieces      what one rank holds of a model's weights
shard       the forward pass of one rank on the CPU
card        the same on a GPU, with `card_weights` and `card_start`: which card, and whether its kernels may be used
exchange    what ranks on GPUs give each other: through host memory, or from card to card
cores       which cores each rank's threads run on
wire        steps and answers between the first rank and the others
rank        the process of every rank but the first
ranks       the first rank's side: starts the others, checks that they match, drives them, ends them
handover    keys and values of a prompt, from the process that computed them to the one that decodes
"""

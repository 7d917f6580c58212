"""Compresses the gradients of a SentenceTransformerTrainer.

torchrun --nproc-per-node 2 sentence_transformers_train.py --output_dir out
"""

import torch
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import HfArgumentParser, TrainerCallback

from gradwire import ddp_comm_hook

hook = ddp_comm_hook("int8")


class CompressedExchange(TrainerCallback):
    """Registers the hook with DDP, in which the trainer wraps the model when training begins."""

    def on_train_begin(self, args, state, control, **kwargs):
        trainer.model_wrapped.register_comm_hook(None, hook)


# Defaults for this example; flags on the command line replace them.
parser = HfArgumentParser(SentenceTransformerTrainingArguments)
parser.set_defaults(use_cpu=True, ddp_backend="gloo", report_to="none", disable_tqdm=True, max_steps=12)
(arguments,) = parser.parse_args_into_dataclasses()

torch.manual_seed(0)
tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
tokenizer.pre_tokenizer = Whitespace()
model = SentenceTransformer(modules=[models.StaticEmbedding(tokenizer, embedding_dim=64)], device="cpu")
pairs = {"anchor": [f"w{number}" for number in range(256)], "positive": [f"w{number + 256}" for number in range(256)]}
trainer = SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict(pairs),
    loss=losses.MultipleNegativesRankingLoss(model),
    callbacks=[CompressedExchange()],
)
trainer.train()
if dist.get_rank() == 0:
    print(hook.stats)
hook.close()

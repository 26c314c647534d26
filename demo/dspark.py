"""The demo's DSpark drafter as a torch module: a DFlash drafter whose anchor gives the first draft, with a bias on each
draft's logits that follows from the token before it, and a head that says how sure it is."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.model import DraftModel, PairConfig, token_losses

TABLE_STD = 0.02


class MarkovHead(nn.Module):
    """The bias that a token gives the logits of the next."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        size, rank = config.shape.vocab_size, config.markov_rank
        self.markov_w1 = nn.Embedding(size, rank)
        self.markov_w2 = nn.Linear(rank, size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=TABLE_STD)
        nn.init.normal_(self.markov_w2.weight, std=TABLE_STD)


class ConfidenceHead(nn.Module):
    """The log-odds that a draft behind right ones is right."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.shape.hidden_size + config.markov_rank, 1)


class DSparkDraftModel(DraftModel):
    """A DSpark drafter with a vanilla Markov head. A block has a place for each draft, the anchor's the first."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)

    def losses(self, embedding: Tensor, features: Tensor, tokens: Tensor, anchors: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each draft behind the right token before it, and that of the confidence head, which changes
        no other parameter."""
        hidden = self.outputs(embedding, features, anchors, labels[..., 0], self.config.num_drafts - 1)
        before, right = self.markov_head.markov_w1(labels[..., :-1]), labels[..., 1:]
        logits = (F.linear(hidden, embedding) + self.markov_head.markov_w2(before)).float()
        sure = self.confidence_head.proj(torch.cat((hidden, before), dim=-1).detach())[..., 0].float()
        is_right = (logits.detach().argmax(dim=-1) == right).float()
        confidence = F.binary_cross_entropy_with_logits(sure, is_right, reduction="none")
        return token_losses(logits, right) + confidence

    def propose(self, embedding: Tensor, features: Tensor, tokens: Sequence[int]) -> list[int]:
        anchors, first = torch.tensor([[features.shape[1]]]), torch.tensor([[tokens[-1]]])
        hidden = self.outputs(embedding, features, anchors, first, self.config.num_drafts - 1)[0, 0]
        return self.choose(F.linear(hidden, embedding), hidden, tokens[-1])

    def choose(self, logits: Tensor, hidden: Tensor, anchor: int) -> list[int]:
        """A walk from the anchor: each draft's logits and the bias of the token before it."""
        tokens = [anchor]
        for own in logits:
            bias = self.markov_head.markov_w2(self.markov_head.markov_w1.weight[tokens[-1]])
            tokens.append(int((own + bias).argmax()))
        return tokens[1:]

"""The sizes of a model and the FLOPs that follow from them; all that the cost model knows of a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention and a gated feed-forward layer.

    Attributes:
        vocab_size: rows of the embedding and of the head; -1 where the tokenizer decides.
        head_dim: of queries, keys and values; 0 becomes dim / n_heads.
        is_tied: embedding and head are one matrix.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int = -1
    head_dim: int = 0
    is_tied: bool = False

    def __post_init__(self):
        object.__setattr__(self, "head_dim", self.head_dim or self.dim // self.n_heads)

    @property
    def q_dim(self) -> int:
        """Values of Q of one token, all heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Values of K (or of V) of one token, all heads."""
        return self.n_kv_heads * self.head_dim

    @property
    def layer_flops_per_token(self) -> float:
        """Forward FLOPs of one token in the matrix products of one layer."""
        return 2 * self.dim * (2 * self.q_dim + 2 * self.kv_dim + 3 * self.ffn_dim)

    @property
    def head_flops_per_token(self) -> float:
        """Forward FLOPs of one token in the output head."""
        return 2 * self.dim * self.vocab_size

    @property
    def embedding_flops_per_token(self) -> float:
        """What the embedding of one token counts for when stages are balanced: it reads and writes a row forward and
        backward, about 8 bytes a value, and a device does some 40 FLOPs in the time of a byte."""
        return 8 * 40 * self.dim

    @property
    def layer_flops_per_pair(self) -> float:
        """Forward FLOPs of one attended (query, key) pair in one layer: scores and weighted values."""
        return 4 * self.q_dim

    @property
    def flops_per_token(self) -> float:
        """Forward FLOPs of one token in all matrix products of the model."""
        return self.n_layers * self.layer_flops_per_token + self.head_flops_per_token

    @property
    def flops_per_pair(self) -> float:
        """Forward FLOPs of one attended pair in all layers."""
        return self.n_layers * self.layer_flops_per_pair

    def training_flops(self, tokens: int, attended_pairs: int) -> float:
        """FLOPs, forward and backward without recomputation, of documents: linear in tokens, attention by attended
        pairs, no padding."""
        return 3 * (self.flops_per_token * tokens + self.flops_per_pair * attended_pairs)

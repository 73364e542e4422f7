"""The arguments of the built-in sequence models, of their data and of their loss: what `model.arguments` and so on may hold."""

import itertools
from typing import Annotated, Literal

from pydantic import Field, model_validator

from jpipe_train.config.section import Count, FilePath, Section

_Width = Annotated[int, Field(ge=1, le=10**6)]
_Length = Annotated[int, Field(ge=1, le=10**5)]
_Symbols = Annotated[int, Field(ge=2, le=10**7)]
_Dropped = Annotated[float, Field(ge=0, lt=1)]
Unusable = Literal["refuse", "drop"]
"""What becomes of a sentence that is empty or longer than the model allows."""


class Gnmt(Section):
    """`model.target: gnmt`: the translator of Wu et al. 2016 with `depth` LSTM layers, half of them in the encoder.

    Attributes:
        vocab_size: symbols of both languages.
        depth: LSTM layers; the first of the encoder reads in both directions.
        width: of the embeddings and of each LSTM.
        dropout: of what flows into an LSTM.
        share_embeddings: both languages have the same vectors.
    """

    vocab_size: _Symbols = 32320
    depth: Annotated[int, Field(ge=4, le=1000)] = 8
    width: _Width = 1024
    dropout: _Dropped = 0.2
    share_embeddings: bool = False

    @model_validator(mode="after")
    def _halves_are_equal(self) -> "Gnmt":
        if self.depth % 2:
            raise ValueError(f"depth {self.depth} is odd, and encoder and decoder have half of the layers each; use an even number")
        return self


class AwdLm(Section):
    """`model.target: awd_lm`: the language model of Merity et al. 2017.

    Attributes:
        vocab_size: words.
        depth: LSTM layers.
        width: of the embeddings, and of the last LSTM if they are tied.
        hidden: of the other LSTMs.
        tied: logits are made with the embeddings of the words.
        dropout_words: of whole words among the embeddings.
        dropout_input: of the embedded words; this one and the next two drop the same numbers at all positions of a row.
        dropout_hidden: between LSTMs.
        dropout_output: after the last LSTM.
        dropout_weights: of the weights from hidden state to hidden state.
        carries: each row goes on from the state in which that row of the batch before ended; otherwise rows begin with zeros, and stages
            may have replicas.
    """

    vocab_size: _Symbols = 10000
    depth: Annotated[int, Field(ge=1, le=1000)] = 6
    width: _Width = 400
    hidden: _Width = 1600
    tied: bool = True
    dropout_words: _Dropped = 0.1
    dropout_input: _Dropped = 0.4
    dropout_hidden: _Dropped = 0.3
    dropout_output: _Dropped = 0.4
    dropout_weights: _Dropped = 0.5
    carries: bool = True


class S2vt(Section):
    """`model.target: s2vt`: the captions of videos of Venugopalan et al. 2015, by two LSTMs.

    Attributes:
        vocab_size: words.
        width: of embedded frames and words.
        hidden: of both LSTMs.
        dropout: of embedded frames and words, and of what the second LSTM gives.
    """

    vocab_size: _Symbols = 13010
    width: _Width = 500
    hidden: _Width = 1000
    dropout: _Dropped = 0.5


class TranslationData(Section):
    """`data.target: translation`: pairs of lines of two aligned files; a sentence is padded to the length of its bucket.

    Attributes:
        folder: has `train.source`, `train.target`, `validation.source`, `validation.target` and a `tokenizer.json` for both languages.
        source_length: tokens of a sentence to translate, its end included.
        target_length: of its translation, likewise.
        buckets: shorter lengths, from the shortest on. A pair is padded to the first that both of its sentences fit into, and batched
            with others of that length, so that batches have one more shape for each.
        unusable: refuse a sentence that is empty or longer, or drop the pair.
    """

    folder: FilePath
    source_length: _Length = 50
    target_length: _Length = 50
    buckets: list[_Length] = []
    unusable: Unusable = "refuse"

    @model_validator(mode="after")
    def _buckets_grow(self) -> "TranslationData":
        longest = max(self.source_length, self.target_length)
        if any(b <= a for a, b in itertools.pairwise((0, *self.buckets, longest))):
            raise ValueError(
                f"buckets {self.buckets}: expected lengths that grow, below {longest} (the larger of source_length and target_length)"
            )
        return self


class WordsData(Section):
    """`data.target: words`: a running text, read by each row of a batch from where that row of the batch before ended.

    Attributes:
        folder: has `train.txt` and `validation.txt`: words with spaces between, a sentence to a line.
        length: words of a row.
        vocab_size: so many of the most frequent words are kept; null: all.
    """

    folder: FilePath
    length: _Length = 70
    vocab_size: _Symbols | None = None


class CaptionsData(Section):
    """`data.target: captions`: videos as the features of their frames, with captions.

    Attributes:
        folder: has `train.tsv` and `validation.tsv` (lines of a video's name, a tab, a caption), and `features/NAME.npz` for each video,
            whose array `features` has a row a frame.
        frames: of a video; from longer ones so many are taken, evenly spaced, and shorter ones are filled up with zeros.
        words: of a caption, its end included.
        features: numbers of a frame.
        vocab_size: so many of the most frequent words are kept; null: all.
        unusable: refuse a caption that is empty or longer, or drop it.
    """

    folder: FilePath
    frames: _Length = 50
    words: _Length = 30
    features: Count = 4096
    vocab_size: _Symbols | None = None
    unusable: Unusable = "refuse"


class SmoothedLoss(Section):
    """`loss.target: smoothed_cross_entropy`: of labels that are `1 - smoothing` one symbol and `smoothing` all symbols alike.

    Attributes:
        smoothing: the share of all symbols.
    """

    smoothing: _Dropped = 0.1

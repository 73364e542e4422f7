"""Folders of tokens for tests."""

from jpipe_lm.data import prepare
from jpipe_lm.data.document_files import Files
from jpipe_lm.data.files.token_files import Index
from jpipe_lm.data.prepare_request import PrepareRequest
from jpipe_train.console.progress import Reporter


def prepare_files(files: Files, tokenizer: str, out: str, reporter: Reporter, fraction: float = 0.05, shard: int = 10**8) -> Index:
    """Write files as a folder of tokens, as `jpipe data prepare` does; a shard ends with the document that makes it that large."""
    keys = {"text_key": files.keys.text or "none", "prompt_key": files.keys.prompt, "answer_key": files.keys.answer}
    request = PrepareRequest(
        source=tuple(files.paths),
        tokenizer=tokenizer,
        out=out,
        form=files.form,
        validation_fraction=fraction,
        shard_tokens=shard,
        **keys,
    )
    return prepare.prepare(request, reporter)

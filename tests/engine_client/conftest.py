from tests.support.byte_tokenizer import model_dir, tokenizer  # noqa: F401

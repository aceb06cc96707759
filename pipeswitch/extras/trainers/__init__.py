"""Training loops of other libraries, as ``job.trainer`` takes them."""

JOBS = {
    "lightning": "lightning_trainer:LightningLoop",
    "transformers": "transformers_trainer:TransformersLoop",
}

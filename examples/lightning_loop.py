"""Lightning: the method inside a LightningModule, its three terms in the log."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import stfseb
from stfseb.data.embedded import read

ROWS = 1000


class Classifier(lightning.LightningModule):
    def __init__(self, method: stfseb.Method, num_data: int) -> None:
        super().__init__()
        self.method, self.num_data = method, num_data

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _index: int) -> torch.Tensor:
        x, y = batch
        terms = self.method.objective(x, y, self.num_data)
        self.log_dict({name: value / len(x) for name, value in terms._asdict().items()}, on_epoch=True)
        return terms.total / len(x)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _index: int) -> None:
        x, y = batch
        probs = self.method.predict_proba(x, samples=10, seed=0)
        self.log("nll", torch.nn.functional.nll_loss(probs.log(), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.method.parameters(), lr=1e-3)


def loader(part: str, rows: int, shuffle: bool = False) -> DataLoader:
    images = read(part).take(slice(0, rows))
    return DataLoader(TensorDataset(images.images, images.labels), batch_size=64, shuffle=shuffle)


def main(epochs: int = 2) -> float:
    torch.manual_seed(0)
    method = stfseb.STFSEB(stfseb.SmallCNN(dropout=0.2), context=read("kmnist"), samples=3)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Classifier(method, ROWS), loader("train", ROWS, shuffle=True), loader("validation", 300))
    nll = float(trainer.callback_metrics["nll"])
    print(f"validation NLL {nll:.3f}")
    return nll


if __name__ == "__main__":
    main()

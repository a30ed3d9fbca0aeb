"""`BagCollection`: pooled features by name, as TorchRec's `EmbeddingBagCollection` gives them, from tables."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.ps.pooling.embedding_bag import EmbeddingBag
from phalanx.ps.queries import lookup

COLLECTION = ("embedding_bag_configs", "embedding_bags", "is_weighted")


class BagCollection(nn.Module):
    """Looks up the bags of all features with one request; features may share a table, and a feature may have several.

    Args:
        bags: Tables by name; each with `include_last_offset`.
        features: Names of the features that each table is looked up for.
        is_weighted: Whether bags are weighted sums.
    """

    def __init__(
        self, bags: dict[str, EmbeddingBag], features: dict[str, list[str]], *, is_weighted: bool = False
    ) -> None:
        super().__init__()
        self.bags, self.features, self.is_weighted = nn.ModuleDict(bags), features, is_weighted

    @classmethod
    def from_torchrec(cls, collection: Any, **settings: Any) -> BagCollection:
        """Return a collection with the tables, features and rows of a TorchRec `EmbeddingBagCollection`.

        Args:
            collection: Not sharded; it is copied. TorchRec itself is not needed.
            settings: Arguments of `EmbeddingBag` for every table, such as `optimizer`.

        Raises:
            ConfigError: If it is no such collection, or there is a table of one of the names.
        """
        if missing := [name for name in COLLECTION if not hasattr(collection, name)]:
            raise ConfigError(
                f"from_torchrec takes an EmbeddingBagCollection that is not sharded, found {type(collection).__name__} "
                f"without {', '.join(missing)}."
            )
        bags, features = {}, {}
        for config in collection.embedding_bag_configs():
            bag = EmbeddingBag.from_torch(collection.embedding_bags[config.name], name=config.name, **settings)
            bag.include_last_offset = True
            bags[config.name], features[config.name] = bag, list(config.feature_names)
        return cls(bags, features, is_weighted=collection.is_weighted())

    def forward(self, features: Any) -> dict[str, Tensor]:
        """Look up the bags of a batch.

        Args:
            features: A TorchRec `KeyedJaggedTensor`, or any mapping from the name of a feature to what has `values()`,
                `offsets()` and `weights_or_none()`.

        Returns:
            Shape (batch, dim) by name of the feature, in the order of the tables; `feature@table` where a feature has
            several tables. `torch.cat(list(pooled.values()), 1)` is what `KeyedTensor.values()` is.

        Raises:
            ConfigError: If a feature is missing.
        """
        names = [(table, feature) for table, of_table in self.features.items() for feature in of_table]
        if missing := sorted({feature for _, feature in names} - set(features.keys())):
            raise ConfigError(f"the batch has no feature {', '.join(missing)}; it has {', '.join(features.keys())}.")
        jagged = {feature: features[feature] for _, feature in names}
        entries = [(self.bags[table], *self._bags_of(jagged[feature])) for table, feature in names]
        several = {feature for _, feature in names if sum(feature == other for _, other in names) > 1}
        labels = [f"{feature}@{table}" if feature in several else feature for table, feature in names]
        return dict(zip(labels, lookup(entries), strict=True))

    def _bags_of(self, jagged: Any) -> tuple[Any, ...]:
        return jagged.values(), jagged.offsets(), jagged.weights_or_none() if self.is_weighted else None

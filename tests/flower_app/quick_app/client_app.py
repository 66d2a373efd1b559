"""Its client, which adds noise to what it sends where the settings say so."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quick_app.task import Net, load_data
from quick_app.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    place, config = context.node_config, context.run_config
    loader, _ = load_data(place["partition-id"], place["num-partitions"], config["batch-size"])  # type: ignore[arg-type]
    loss = train_fn(model, loader, config, msg.content["config"]["lr"])
    state = model.state_dict()
    for name, value in state.items():
        if value.is_floating_point():
            state[name] = value + float(config["noise"]) * torch.randn_like(value)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})  # type: ignore[arg-type]
    return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=msg)

"""The order of weights."""

import torch


def shuffle_weight(
    x: torch.Tensor,
    layout: tuple[int, int] = (16, 16),
    use_int4: bool = False,
    is_guinterleave: bool = False,
    gate_up: bool = False,
) -> torch.Tensor:
    rows, columns = x.shape[-2:]
    tile_rows, tile_columns = layout[0], 2 * layout[1]
    assert rows % tile_rows == 0
    assert columns % tile_columns == 0
    run = 16 // x.element_size()
    tiles = x.view(-1, rows // tile_rows, tile_rows, columns // tile_columns, tile_columns // run, run)
    shuffled = tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(x.shape)
    shuffled.is_shuffled = True
    return shuffled


def plain(x: torch.Tensor) -> torch.Tensor:
    """As it was. Not of the library. # [experts, rows, columns]"""
    num, rows, columns = x.shape
    run = 16 // x.element_size()
    return x.view(num, rows // 16, columns // 32, 32 // run, 16, run).permute(0, 1, 4, 2, 3, 5).reshape(x.shape)

"""`GET /kaon/limits`: the caller's use and limits. `GET /kaon/owners`: the use of all owners, for operators."""

from fastapi import Request, Response

from server.endpoints import ENDPOINTS, EndpointFamily
from server.frontend import owner_of
from server.models import Models
from server.schemas.body import as_json
from server.schemas.operations import OwnerLimits, OwnerList, OwnerUse, QuotaView

endpoints = ENDPOINTS.register("limits")(EndpointFamily())

_MOST_LISTED = 1000


@endpoints.get("/kaon/limits", OwnerLimits, scope=None)
async def limits(http: Request) -> Response:
    """Return the caller's present use, total use and limits."""
    shared, owner = Models.of(http.app).shared, owner_of(http.scope)
    accounts, quotas, settings = shared.accounts, shared.quotas, shared.reloader.settings
    return as_json(
        OwnerLimits(
            name=owner.name,
            scopes=sorted(owner.scopes),
            group=owner.group,
            weight=owner.weight,
            in_use=accounts.of_owner(owner.party),
            used=accounts.tally(owner).counts(),
            quotas={kind: QuotaView(*state) for kind, state in quotas.states(owner).items()},
            most={
                "requests": settings.max_requests_per_key,
                "background_responses": settings.most_background_responses_per_key,
            },
        )
    )


@endpoints.get("/kaon/owners", OwnerList, scope="admin")
async def owners(http: Request) -> Response:
    """Return the present and total use of each owner. Needs a key of the scope admin."""
    accounts = Models.of(http.app).shared.accounts
    tallies = sorted(accounts.tallies(), key=lambda tally: tally.requests, reverse=True)
    data = [
        OwnerUse(
            name=tally.owner.name,
            key=tally.owner.key and tally.owner.key[:12],
            in_use=accounts.of_owner(tally.owner.party),
            used=tally.counts(),
        )
        for tally in tallies[:_MOST_LISTED]
    ]
    return as_json(OwnerList(data=data, has_more=len(tallies) > _MOST_LISTED))

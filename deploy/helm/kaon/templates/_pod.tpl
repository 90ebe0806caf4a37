{{- /* The alert rules know jobs by the ending -kaon, so that a long release name is cut and not the whole. */}}
{{- define "kaon.name" -}}
{{- if eq .Release.Name .Chart.Name }}{{ .Chart.Name }}{{ else }}{{ printf "%s-%s" (.Release.Name | trunc 45 | trimSuffix "-") .Chart.Name }}{{ end }}
{{- end }}

{{- /* What selects the pods of this release, and nothing else. */}}
{{- define "kaon.labels" -}}
{app: {{ include "kaon.name" . }}}
{{- end }}

{{- /* What selects the pods that serve HTTP: of a group, pod 0. */}}
{{- define "kaon.servingLabels" -}}
{app: {{ include "kaon.name" . }}{{ if .Values.multiHost.enabled }}, leaderworkerset.sigs.k8s.io/worker-index: "0"{{ end }}}
{{- end }}

{{- /* A LeaderWorkerSet makes a headless Service of its own name, by which pods find pod 0: no other may have that name. */}}
{{- define "kaon.workload" -}}
{{ include "kaon.name" . }}{{ if .Values.multiHost.enabled }}-hosts{{ end }}
{{- end }}

{{- define "kaon.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else if .tag }}{{ .repository }}:{{ .tag }}{{ else if eq .repository "kaon" }}kaon{{ else }}{{ .repository }}:{{ $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "kaon.model" -}}
{{- if and (eq .Values.modelVolume.kind "image") (not .Values.model) }}/models{{ else }}{{ .Values.model }}{{ end }}
{{- end }}

{{- /* The name that requests give: routers compare it with the end of the events' topic. */}}
{{- define "kaon.servedName" -}}
{{- $names := default list .Values.settings.served_model_name }}
{{- if kindIs "string" $names }}{{ $names = splitList "," $names }}{{ end }}
{{- if $names }}{{ first $names | trim }}{{ else }}{{ include "kaon.model" . | default "kaon-demo" }}{{ end }}
{{- end }}

{{- /* Settings that other parts of the pod go by, such as probes, ports and the grace period, and the values for them. */}}
{{- define "kaon.ownSettings" -}}
model: model
host: service
port: service.port
drain_timeout: drainSeconds
nnodes: multiHost.size
node_rank: multiHost.enabled
master_addr: multiHost.enabled
kv_events_endpoint: router.kvEvents.enabled
kv_events_replay_endpoint: router.kvEvents.enabled
kv_events_topic: settings.served_model_name
ssl_certfile: tls.enabled
ssl_keyfile: tls.enabled
api_key: apiKeys.secret
api_key_file: apiKeys.asFile
{{- end }}

{{- define "kaon.args" -}}
{{- $own := fromYaml (include "kaon.ownSettings" .) }}
{{- range $name := keys .Values.settings | sortAlpha }}
{{- with get $own $name }}
{{- fail (printf "settings.%s is the chart's own: set %s in its place" $name .) }}
{{- end }}
{{- end -}}
- serve
{{- with include "kaon.model" . }}
- {{ . | quote }}
{{- end }}
- --host=0.0.0.0
- --drain-timeout={{ .Values.drainSeconds }}
{{- if .Values.multiHost.enabled }}
- --nnodes={{ .Values.multiHost.size }}
- --master-addr=$(LWS_LEADER_ADDRESS)
{{- end }}
{{- if .Values.router.aliases }}
- --metrics-aliases=vllm
{{- end }}
{{- if .Values.router.kvEvents.enabled }}
- --kv-events-endpoint=tcp://*:5557
- --kv-events-replay-endpoint=tcp://*:5657
- {{ printf "--kv-events-topic=kv@$(POD_IP)@%s" (include "kaon.servedName" .) | quote }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- $flag := replace "_" "-" $name }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $flag (join "," $value) | quote }}
{{- else if kindIs "float64" $value }}
- --{{ $flag }}={{ if eq (floor $value) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kaon.probe" -}}
{{- if .Values.multiHost.enabled }}
# Pod 0 is asked by HTTP. The others serve none, count as ready, and end by themselves when they cannot go on.
exec: {command: [/opt/kaon/.venv/bin/python, -m, server.healthcheck, {{ .path }}]}
timeoutSeconds: 10
{{- else }}
httpGet: {path: {{ .path }}, port: http{{ if .Values.tls.enabled }}, scheme: HTTPS{{ end }}}
timeoutSeconds: 5
{{- end }}
{{- end }}

{{- define "kaon.podTemplate" -}}
metadata:
  labels:
    app: {{ include "kaon.name" . }}
{{- with .Values.podLabels }}
{{ toYaml . | indent 4 }}
{{- end }}
{{- with .Values.podAnnotations }}
  annotations:
{{ toYaml . | indent 4 }}
{{- end }}
spec:
  # Kubernetes would set KAON_PORT=tcp://... for a Service named kaon, where Kaon reads its own settings.
  enableServiceLinks: false
  # Kaon asks nothing of the cluster.
  automountServiceAccountToken: false
  # Longer than preStop and --drain-timeout together.
  terminationGracePeriodSeconds: {{ add .Values.drainSeconds 20 }}
{{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .Values.serviceAccountName }}
  serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
{{- end }}
{{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
  nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
  tolerations: {{ toJson . }}
{{- end }}
{{- with .Values.affinity }}
  affinity: {{ toJson . }}
{{- end }}
{{- if .Values.topologySpread.enabled }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ .Values.topologySpread.key }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: {matchLabels: {{ include "kaon.labels" . }}}
{{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    # By default the kubelet lets the group write all files of a volume at each mount, and Kaon maps no packed weights that
    # others may write.
    fsGroupChangePolicy: OnRootMismatch
{{- if and (eq .Values.accelerator.type "amd") .Values.accelerator.renderGroup }}
    supplementalGroups: [{{ int64 .Values.accelerator.renderGroup }}]
{{- end }}
    seccompProfile: {type: RuntimeDefault}
{{- if .Values.download.enabled }}
  initContainers:
    - name: download
      image: {{ include "kaon.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [pull, {{ required "download.enabled needs a model" .Values.model | quote }}]
{{- with .Values.download.tokenSecret }}
      env:
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
      resources:
        requests: {cpu: "1", memory: 1Gi}
        limits: {memory: 2Gi}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: checkpoints, mountPath: /var/cache/kaon}
        - {name: temporary, mountPath: /tmp}
{{- end }}
  containers:
    - name: kaon
      image: {{ include "kaon.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
{{ include "kaon.args" . | indent 8 }}
      env:
{{- if .Values.router.kvEvents.enabled }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- if .Values.multiHost.enabled }}
        - name: KAON_NODE_RANK
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
        - name: KAON_CLUSTER_KEY
          valueFrom: {secretKeyRef: {name: {{ .Values.multiHost.clusterKeySecret }}, key: key}}
{{- end }}
        # No pod starts without keys. /metrics needs one too: give Prometheus a key of the scope `metrics`.
{{- if .Values.apiKeys.asFile }}
        - {name: KAON_API_KEY_FILE, value: /etc/kaon/keys/{{ .Values.apiKeys.key }}}
{{- else }}
        - name: KAON_API_KEY
          valueFrom: {secretKeyRef: {name: {{ .Values.apiKeys.secret }}, key: {{ .Values.apiKeys.key }}}}
{{- end }}
{{- if .Values.router.keylessMetrics }}
        - {name: KAON_KEYLESS_PATHS, value: "/livez,/readyz,/health,/ping,/metrics"}
{{- end }}
{{- if .Values.tls.enabled }}
        - {name: KAON_SSL_CERTFILE, value: /etc/kaon/tls/tls.crt}
        - {name: KAON_SSL_KEYFILE, value: /etc/kaon/tls/tls.key}
{{- end }}
{{- with .Values.otlpEndpoint }}
        - {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .Values.env }}
{{ toYaml . | indent 8 }}
{{- end }}
      ports:
        - {name: http, containerPort: 8000}
{{- if .Values.router.kvEvents.enabled }}
        - {name: kv-events, containerPort: 5557}
        - {name: kv-replay, containerPort: 5657}
{{- end }}
      # Not ready while the model loads; a large one may take as long as the startup probe allows.
      startupProbe:
{{ include "kaon.probe" (merge (dict "path" "/readyz") .) | trim | indent 8 }}
        periodSeconds: 5
        failureThreshold: {{ div (add .Values.startupSeconds 4) 5 }}
      readinessProbe:
{{ include "kaon.probe" (merge (dict "path" "/readyz") .) | trim | indent 8 }}
        periodSeconds: 5
      livenessProbe:
{{ include "kaon.probe" (merge (dict "path" "/livez") .) | trim | indent 8 }}
        periodSeconds: 10
      # Until Services and routers have taken the pod off their lists, it accepts requests.
{{- if .Values.multiHost.enabled }}
      # Asked to end together with pod 0, the others stay until it has answered its requests, and end with it.
      lifecycle:
        preStop:
          exec: {command: [sh, -c, 'if [ "$KAON_NODE_RANK" = 0 ]; then sleep 5; else sleep {{ add .Values.drainSeconds 15 }}; fi']}
{{- else }}
      lifecycle:
        preStop:
          exec: {command: [sleep, "5"]}
{{- end }}
      # No limit of processors: a throttled step delays every stream. Memory is what one pod could take from others.
      resources:
        requests: {{ toJson .Values.resources.requests }}
{{- $limits := deepCopy .Values.resources.limits }}
{{- if ne .Values.accelerator.type "none" }}
{{- $_ := set $limits (printf "%s.com/gpu" .Values.accelerator.type) (int64 .Values.accelerator.count) }}
{{- end }}
        limits: {{ toJson $limits }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: checkpoints, mountPath: /var/cache/kaon}
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: temporary, mountPath: /tmp}
{{- if eq .Values.modelVolume.kind "image" }}
        - {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.apiKeys.asFile }}
        - {name: api-keys, mountPath: /etc/kaon/keys, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
        - {name: tls, mountPath: /etc/kaon/tls, readOnly: true}
{{- end }}
  volumes:
{{- if eq .Values.modelVolume.kind "claim" }}
    - {name: checkpoints, persistentVolumeClaim: {claimName: {{ default (include "kaon.name" .) .Values.modelVolume.existingClaim }}}}
{{- else }}
    # Each pod downloads and compiles its own; modelVolume.kind=claim keeps it from pod to pod.
    - {name: checkpoints, emptyDir: {sizeLimit: {{ .Values.modelVolume.size }}}}
{{- end }}
{{- if eq .Values.modelVolume.kind "image" }}
    - {name: model, image: {reference: {{ required "modelVolume.kind=image needs modelVolume.image" .Values.modelVolume.image | quote }}, pullPolicy: IfNotPresent}}
{{- end }}
    # RCCL's and NCCL's; without it there are 64 MiB. What is used counts as the container's memory.
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}}
    # Sockets between processes, while they connect; uploaded files.
    - {name: temporary, emptyDir: {sizeLimit: 1Gi}}
{{- if .Values.apiKeys.asFile }}
    - {name: api-keys, secret: {secretName: {{ .Values.apiKeys.secret }}, defaultMode: 288}}
{{- end }}
{{- if .Values.tls.enabled }}
    - {name: tls, secret: {secretName: {{ include "kaon.name" . }}-tls, defaultMode: 288}}
{{- end }}
{{- end }}

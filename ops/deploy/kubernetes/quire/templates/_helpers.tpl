{{/* The beginning of all names; it leaves room for the longest ending. */}}
{{- define "quire.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 38 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 38 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What never changes of a component's pods. Called with (list $ "gateway"). */}}
{{- define "quire.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "quire.labels" -}}
{{- $root := index . 0 -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Called with (list $ .Values.gateway.image). */}}
{{- define "quire.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{ printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) | quote }}
{{- end -}}

{{- define "quire.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.userId }}
runAsGroup: {{ .Values.userId }}
fsGroup: {{ .Values.userId }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where the pods are put. Called with (list $ "gateway" .Values.gateway). */}}
{{- define "quire.placement" -}}
{{- $values := index . 2 -}}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "quire.selector" (list (index $ 0) (index $ 1)) | nindent 8 }}
  {{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "quire.redisHost" -}}
{{- if .Values.redis.enabled -}}
{{ include "quire.fullname" . }}-redis.{{ .Release.Namespace }}.svc
{{- else -}}
{{ required "redis.external.host: it is not set; give the host of a Redis, or redis.enabled=true" .Values.redis.external.host }}
{{- end -}}
{{- end -}}

{{- define "quire.redisPort" -}}
{{- if .Values.redis.enabled }}6379{{ else }}{{ .Values.redis.external.port }}{{ end -}}
{{- end -}}

{{/* The secret with the password of Redis; empty is none. */}}
{{- define "quire.redisSecret" -}}
{{- if .Values.redis.existingSecret -}}
{{ .Values.redis.existingSecret }}
{{- else if .Values.redis.enabled -}}
{{ include "quire.fullname" . }}-redis
{{- end -}}
{{- end -}}

{{- define "quire.redisSecretKey" -}}
{{- if .Values.redis.existingSecret }}{{ .Values.redis.existingSecretKey }}{{ else }}password{{ end -}}
{{- end -}}

{{/* $(REDIS_PASSWORD) is put in by Kubernetes, when a container starts. */}}
{{- define "quire.redisUrl" -}}
{{- $external := .Values.redis.external -}}
{{- $scheme := "redis" -}}{{- $user := "" -}}{{- $database := 0 -}}
{{- if not .Values.redis.enabled -}}
{{- $user = $external.username -}}
{{- $database = $external.database -}}
{{- if $external.tls }}{{ $scheme = "rediss" }}{{ end -}}
{{- end -}}
{{- $login := "" -}}
{{- if include "quire.redisSecret" . }}{{ $login = printf "%s:$(REDIS_PASSWORD)@" $user }}{{ end -}}
{{ printf "%s://%s%s:%s/%d" $scheme $login (include "quire.redisHost" .) (include "quire.redisPort" .) (int $database) }}
{{- end -}}

{{/* The port that a URL names, or that of its scheme. */}}
{{- define "quire.urlPort" -}}
{{- $url := urlParse . -}}
{{ regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end -}}

{{/* A model that is not a folder is downloaded. */}}
{{- define "quire.downloads" -}}
{{- if not (hasPrefix "/" .Values.model.path) }}true{{ end -}}
{{- end -}}

{{/* The environment that gateways and workers have in common. Called with (list $ .Values.gateway). */}}
{{- define "quire.environment" -}}
{{- $root := index . 0 -}}{{- $values := index . 1 -}}
{{- with include "quire.redisSecret" $root }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ include "quire.redisSecretKey" $root }}
{{- end }}
- name: QUIRE_REDIS_URL
  value: {{ include "quire.redisUrl" $root | quote }}
- name: QUIRE_MODEL
  value: {{ $root.Values.model.path | quote }}
- name: QUIRE_SERVED_MODEL_NAME
  value: {{ $root.Values.model.name | quote }}
- name: QUIRE_DRAIN_S
  value: {{ $values.drainSeconds | quote }}
- name: QUIRE_INTERNAL_HOST
  value: 0.0.0.0
- name: QUIRE_INTERNAL_PORT
  value: "9100"
{{- with $root.Values.model.huggingFaceSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $root.Values.model.huggingFaceKey }}
{{- end }}
{{- range $name, $value := merge (dict) $values.settings $root.Values.settings }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "quire.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/quire
{{- if .Values.model.existingClaim }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end -}}

{{- define "quire.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 64Mi
- name: cache
{{- with .Values.model.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ . }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .Values.model.cache.sizeLimit }}
{{- end }}
{{- with .Values.model.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- end -}}

{{/* A GET as a probe that says no after so many seconds. Called with (list path port seconds). */}}
{{- define "quire.probe" -}}
httpGet:
  path: {{ index . 0 }}
  port: {{ index . 1 }}
periodSeconds: 5
timeoutSeconds: 5
failureThreshold: {{ max 1 (div (index . 2) 5) }}
{{- end -}}
